//! One error type for every layer: a status whose number never changes, and one line for a person.

use std::fmt;
use std::sync::Arc;

/// What came of a call. The numbers are part of the ABI: they are never reused and never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
#[allow(missing_docs)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// An argument is wrong by itself: NULL, out of range, unknown, too large.
    InvalidArgument = 1,
    /// The arguments are fine, the moment or the combination is not.
    InvalidUsage = 2,
    /// Ranks called different things where they had to call the same, or run different builds of unisono.
    Mismatch = 3,
    /// The deadline passed.
    Timeout = 4,
    /// A peer died, left, or reported a failure.
    PeerFailed = 5,
    /// The communicator was aborted by its user.
    Aborted = 6,
    /// This rank is not a member of the group.
    NotMember = 7,
    /// Not supported here; the text says what is.
    Unsupported = 8,
    /// The operating system refused.
    System = 9,
    /// No memory, or no room in a fixed area.
    OutOfMemory = 10,
    /// The CUDA driver refused.
    Cuda = 11,
    /// A bug in unisono.
    Internal = 12,
    /// The work is still running (answered by tests, never by waits).
    InProgress = 13,
}

/// A status and its cause in one line. Cheap to clone: the same root cause is given to many operations.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    status: Status,
    text: Arc<str>,
}

/// The result of everything that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with its text. `status` is not [`Status::Ok`]. What others have put into it, names and causes
    /// of theirs, may have line ends: they become blanks.
    pub fn new(status: Status, text: impl Into<String>) -> Error {
        debug_assert_ne!(status, Status::Ok);
        Error { status, text: in_one_line(text.into()).into() }
    }

    /// A refusal of the operating system: what was tried, and what it said.
    pub fn system(what: impl fmt::Display, cause: std::io::Error) -> Error {
        Error::new(Status::System, format!("{what}: {cause}"))
    }

    /// The number that C sees.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The line for a person.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The same cause, told with where it happened.
    pub fn context(&self, place: impl fmt::Display) -> Error {
        Error::new(self.status, format!("{place}: {}", self.text))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.status, self.text)
    }
}

impl std::error::Error for Error {}

/// A text in which line ends and other control characters are blanks.
pub fn in_one_line(text: String) -> String {
    if text.contains(char::is_control) { text.replace(char::is_control, " ") } else { text }
}

/// `fail!(Mismatch, "rank {r} …")`: returns an [`Error`] from the enclosing function.
#[macro_export]
macro_rules! fail {
    ($status:ident, $($text:tt)+) => {
        return Err($crate::error::Error::new($crate::error::Status::$status, format!($($text)+)))
    };
}
pub use crate::fail;
