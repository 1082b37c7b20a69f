//! Statuses, the text of a thread's last failure, and the guard around every export.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::mem::ManuallyDrop;
use std::sync::Once;

use unisono::error::{Error, Result, Status};
use unisono::logging;
use unisono::panics::caught;
use unisono::sys::thread_end::ThreadEnd;

/// What came of a call: one of enum unisono_status. Always 32 bits, in C and in C++.
pub type unisono_status_t = i32;

/// The values of unisono_status_t. The numbers never change and are never reused.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum unisono_status {
    /// Done.
    UNISONO_OK = 0,
    /// An argument is wrong by itself: NULL, out of range, unknown, too large.
    UNISONO_INVALID_ARGUMENT = 1,
    /// The arguments are fine, the moment or the combination is not.
    UNISONO_INVALID_USAGE = 2,
    /// Ranks called different things where they had to call the same, or run different builds of unisono.
    UNISONO_MISMATCH = 3,
    /// The deadline passed.
    UNISONO_TIMEOUT = 4,
    /// A peer died, left, or reported a failure.
    UNISONO_PEER_FAILED = 5,
    /// The program ended it: unisono_context_abort on some rank, or, and then the context has not failed,
    /// unisono_work_cancel or unisono_buffer_abort_wait.
    UNISONO_ABORTED = 6,
    /// This rank is not a member of the group.
    UNISONO_NOT_MEMBER = 7,
    /// Not supported here; the text says what is.
    UNISONO_UNSUPPORTED = 8,
    /// The operating system refused.
    UNISONO_SYSTEM = 9,
    /// No memory, or no room in a fixed area.
    UNISONO_OUT_OF_MEMORY = 10,
    /// The CUDA driver refused.
    UNISONO_CUDA = 11,
    /// A bug in unisono.
    UNISONO_INTERNAL = 12,
    /// The work is still running. Answered by unisono_work_status only.
    UNISONO_IN_PROGRESS = 13,
}

/// The text of this thread's last failure: one line that says what happened, where, and what to do. Empty if
/// nothing has failed. Never NULL.
///
/// The text belongs to the library and stays valid until the next call that fails on the same thread, or the
/// end of the thread; calls that succeed leave it alone. For a failure that happened later, on another
/// thread, see unisono_work_error and unisono_context_error.
#[unsafe(no_mangle)]
pub extern "C" fn unisono_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.as_ref().map_or(c"".as_ptr(), |text| text.as_ptr()))
}

/// The name of a status as the header spells it, such as "UNISONO_TIMEOUT"; "unknown status" for any other
/// number. The text is static.
#[unsafe(no_mangle)]
pub extern "C" fn unisono_status_name(status: unisono_status_t) -> *const c_char {
    status_name(status).as_ptr()
}

fn status_name(status: unisono_status_t) -> &'static CStr {
    match status {
        0 => c"UNISONO_OK",
        1 => c"UNISONO_INVALID_ARGUMENT",
        2 => c"UNISONO_INVALID_USAGE",
        3 => c"UNISONO_MISMATCH",
        4 => c"UNISONO_TIMEOUT",
        5 => c"UNISONO_PEER_FAILED",
        6 => c"UNISONO_ABORTED",
        7 => c"UNISONO_NOT_MEMBER",
        8 => c"UNISONO_UNSUPPORTED",
        9 => c"UNISONO_SYSTEM",
        10 => c"UNISONO_OUT_OF_MEMORY",
        11 => c"UNISONO_CUDA",
        12 => c"UNISONO_INTERNAL",
        13 => c"UNISONO_IN_PROGRESS",
        _ => c"unknown status",
    }
}

thread_local! {
    /// Not dropped with its thread, but behind all that runs there: destructors of the program read it, too,
    /// and fail.
    static LAST_ERROR: RefCell<ManuallyDrop<Option<CString>>> = const { RefCell::new(ManuallyDrop::new(None)) };
}

static FORGET: ThreadEnd = ThreadEnd::new(|| LAST_ERROR.with_borrow_mut(|last| **last = None));

/// Runs the body of an export: a failure or a panic becomes a status and this thread's last error.
pub(super) fn guard(body: impl FnOnce() -> Result<()>) -> unisono_status_t {
    guard_or(|error| error.status() as unisono_status_t, || body().map(|()| Status::Ok as unisono_status_t))
}

/// As [`guard`], for an export that answers with a value: `otherwise` gives the answer of a failure.
pub(super) fn guard_or<T>(otherwise: impl FnOnce(&Error) -> T, body: impl FnOnce() -> Result<T>) -> T {
    static LOG: Once = Once::new();
    LOG.call_once(|| _ = logging::install());
    match caught(body) {
        Ok(value) => value,
        Err(error) => {
            set_last_error(error.text());
            otherwise(&error)
        }
    }
}

fn set_last_error(text: &str) {
    FORGET.arm();
    LAST_ERROR.with_borrow_mut(|last| **last = Some(c_text(text)));
}

/// A text for C. A NUL byte cannot be kept and ends nothing early: it is shown as such.
pub(super) fn c_text(text: &str) -> CString {
    CString::new(text).unwrap_or_else(|_| CString::new(text.replace('\0', "\\0")).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use unisono::error::fail;

    fn last_error() -> String {
        // SAFETY: the pointer is a C string of this thread, which no call changes before the copy is made.
        unsafe { CStr::from_ptr(unisono_last_error()) }.to_str().unwrap().to_owned()
    }

    /// The numbers are the ABI: this list is only ever added to.
    #[test]
    fn status_numbers_never_change() {
        use unisono_status::*;
        let pinned = [
            (UNISONO_OK, Status::Ok, 0, c"UNISONO_OK"),
            (UNISONO_INVALID_ARGUMENT, Status::InvalidArgument, 1, c"UNISONO_INVALID_ARGUMENT"),
            (UNISONO_INVALID_USAGE, Status::InvalidUsage, 2, c"UNISONO_INVALID_USAGE"),
            (UNISONO_MISMATCH, Status::Mismatch, 3, c"UNISONO_MISMATCH"),
            (UNISONO_TIMEOUT, Status::Timeout, 4, c"UNISONO_TIMEOUT"),
            (UNISONO_PEER_FAILED, Status::PeerFailed, 5, c"UNISONO_PEER_FAILED"),
            (UNISONO_ABORTED, Status::Aborted, 6, c"UNISONO_ABORTED"),
            (UNISONO_NOT_MEMBER, Status::NotMember, 7, c"UNISONO_NOT_MEMBER"),
            (UNISONO_UNSUPPORTED, Status::Unsupported, 8, c"UNISONO_UNSUPPORTED"),
            (UNISONO_SYSTEM, Status::System, 9, c"UNISONO_SYSTEM"),
            (UNISONO_OUT_OF_MEMORY, Status::OutOfMemory, 10, c"UNISONO_OUT_OF_MEMORY"),
            (UNISONO_CUDA, Status::Cuda, 11, c"UNISONO_CUDA"),
            (UNISONO_INTERNAL, Status::Internal, 12, c"UNISONO_INTERNAL"),
            (UNISONO_IN_PROGRESS, Status::InProgress, 13, c"UNISONO_IN_PROGRESS"),
        ];
        for (ours, inner, number, name) in pinned {
            assert_eq!(ours as i32, number);
            assert_eq!(inner as i32, number);
            assert_eq!(status_name(number), name);
        }
        assert_eq!(status_name(14), c"unknown status");
        assert_eq!(status_name(-1), c"unknown status");
    }

    #[test]
    fn a_failure_leaves_its_text_and_a_success_leaves_it_alone() {
        let failed = guard(|| fail!(Timeout, "nothing from rank {} for 30 s", 3));
        assert_eq!(failed, unisono_status::UNISONO_TIMEOUT as i32);
        assert_eq!(last_error(), "nothing from rank 3 for 30 s");
        assert_eq!(guard(|| Ok(())), 0);
        assert_eq!(last_error(), "nothing from rank 3 for 30 s");
    }

    #[test]
    fn the_last_error_belongs_to_the_thread() {
        guard(|| fail!(System, "here"));
        let there = std::thread::spawn(last_error).join().unwrap();
        assert_eq!(there, "");
        assert_eq!(last_error(), "here");
    }

    /// What a destructor finds that runs when a thread ends, after those of all other thread-locals.
    struct Late(std::sync::mpsc::Sender<[String; 2]>);

    impl Drop for Late {
        fn drop(&mut self) {
            let before = last_error();
            guard(|| fail!(System, "late"));
            // The test may be over.
            let _ = self.0.send([before, last_error()]);
        }
    }

    thread_local! {
        static LATE: std::cell::Cell<Option<Late>> = const { std::cell::Cell::new(None) };
    }

    #[test]
    fn destructors_of_a_thread_read_its_text_and_leave_theirs() {
        let (tell, told) = std::sync::mpsc::channel();
        let body = || {
            // The first that has a destructor is the last to be dropped.
            LATE.set(Some(Late(tell)));
            guard(|| fail!(System, "before"));
        };
        std::thread::spawn(body).join().unwrap();
        assert_eq!(told.recv().unwrap(), ["before", "late"]);
    }

    #[test]
    fn a_panic_becomes_an_internal_error_with_its_text_and_place() {
        let status = guard(|| panic!("three is {}", 4));
        assert_eq!(status, unisono_status::UNISONO_INTERNAL as i32);
        let text = last_error();
        assert!(text.contains("three is 4"), "{text}");
        assert!(text.contains("status.rs"), "{text}");
    }

    #[test]
    fn a_text_with_a_nul_is_told_whole() {
        guard(|| fail!(System, "a\0b"));
        assert_eq!(last_error(), "a b");
    }
}
