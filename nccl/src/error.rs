//! Results, the text of a thread's last failure, and the guard around every export.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::Once;

pub(crate) use unisono::error::{Error, Result, Status};
pub(crate) use unisono::panics::caught;
use unisono::signature::Making;
use unisono::sys::thread_end::ThreadEnd;

use crate::abi::{ncclComm_t, ncclResult, ncclResult_t};
use crate::communicator::MEETING_VARIABLE;
use crate::{communicator, debug};

/// `fail!(InvalidArgument, "root {root} …")`: returns an [`Error`] from the enclosing function.
macro_rules! fail {
    ($status:ident, $($text:tt)+) => {
        return Err($crate::error::Error::new($crate::error::Status::$status, format!($($text)+)))
    };
}
pub(crate) use fail;

/// `ncclSuccess`.
pub(crate) const SUCCESS: ncclResult_t = ncclResult::ncclSuccess as ncclResult_t;
/// `ncclInProgress`.
pub(crate) const IN_PROGRESS: ncclResult_t = ncclResult::ncclInProgress as ncclResult_t;

/// The result that stands for a status. A timeout is the other ranks' doing: NCCL has a result of its own for
/// that only since 2.30, which clients of the version that this library reports do not know.
pub(crate) fn result(status: Status) -> ncclResult_t {
    let result = match status {
        Status::Ok => ncclResult::ncclSuccess,
        Status::Cuda => ncclResult::ncclUnhandledCudaError,
        Status::System | Status::OutOfMemory => ncclResult::ncclSystemError,
        Status::Internal => ncclResult::ncclInternalError,
        Status::InvalidArgument => ncclResult::ncclInvalidArgument,
        Status::InvalidUsage | Status::Mismatch | Status::NotMember | Status::Unsupported => {
            ncclResult::ncclInvalidUsage
        }
        Status::Timeout | Status::PeerFailed | Status::Aborted => ncclResult::ncclRemoteError,
        Status::InProgress => ncclResult::ncclInProgress,
    };
    result as ncclResult_t
}

/// A sentence for a result; "unknown result" for any other number. The text is static.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: ncclResult_t) -> *const c_char {
    let text = match result {
        0 => c"no error",
        1 => c"the CUDA driver refused (ncclGetLastError has the cause)",
        2 => c"the operating system refused (ncclGetLastError has the cause)",
        3 => c"internal error, please report it (ncclGetLastError has the cause)",
        4 => c"invalid argument (ncclGetLastError says which)",
        5 => c"invalid usage (ncclGetLastError says why)",
        6 => c"another rank failed, left or did not answer in time (ncclGetLastError says which)",
        7 => c"in progress",
        8 => c"timed out (ncclGetLastError says what was waited for)",
        _ => c"unknown result",
    };
    text.as_ptr()
}

/// The text of this thread's last failure: one line that says what happened, who did it and what to do. If
/// nothing has failed on this thread and `comm` is a communicator that has failed, the text of that failure.
/// Empty otherwise, never NULL. `comm` may be NULL.
///
/// The text is valid until the next call that fails on the same thread.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(comm: ncclComm_t) -> *const c_char {
    let quiet = LAST_ERROR.with_borrow(|last| last.text().is_empty());
    if quiet && let Ok(Some(failure)) = caught(|| Ok(communicator::find(comm)?.failure())) {
        tell(&failure);
    }
    LAST_ERROR.with_borrow(|last| last.text().as_ptr())
}

thread_local! {
    /// Not dropped with its thread, but behind all that runs there: destructors of the program read it, too,
    /// and fail.
    static LAST_ERROR: RefCell<ManuallyDrop<Texts>> = const { RefCell::new(ManuallyDrop::new(Texts::NONE)) };
}

static FORGET: ThreadEnd = ThreadEnd::new(|| LAST_ERROR.with_borrow_mut(|last| **last = Texts::NONE));

/// What ncclGetLastError may have given out stays where it is until a call fails: telling of a communicator's
/// failure is no failure.
struct Texts {
    /// Of the last call that failed.
    last: Option<CString>,
    /// Of the communicators that were told of since, the last told last, each text once.
    told: Vec<CString>,
}

impl Texts {
    const NONE: Texts = Texts { last: None, told: Vec::new() };

    fn text(&self) -> &CStr {
        self.told.last().or(self.last.as_ref()).map_or(c"", |text| text)
    }

    fn tell(&mut self, text: CString) {
        let text = match self.told.iter().position(|told| *told == text) {
            Some(place) => self.told.remove(place),
            None => text,
        };
        self.told.push(text);
    }
}

/// Runs the body of an export: a failure or a panic becomes a result and this thread's last error.
pub(crate) fn guard(body: impl FnOnce() -> Result<ncclResult_t>) -> ncclResult_t {
    guard_or(|error| result(error.status()), body)
}

/// As [`guard`], for an export that answers with something else.
pub(crate) fn guard_or<T>(otherwise: impl FnOnce(&Error) -> T, body: impl FnOnce() -> Result<T>) -> T {
    static LOG: Once = Once::new();
    LOG.call_once(debug::install);
    match caught(body) {
        Ok(value) => value,
        Err(error) => {
            log::warn!("{error}");
            remember(&error);
            otherwise(&error)
        }
    }
}

/// Makes `error` this thread's last one.
pub(crate) fn remember(error: &Error) {
    FORGET.arm();
    LAST_ERROR.with_borrow_mut(|last| **last = Texts { last: Some(line(error)), told: Vec::new() });
}

/// The failure of a communicator is what this thread learned last.
pub(crate) fn tell(failure: &Error) {
    FORGET.arm();
    LAST_ERROR.with_borrow_mut(|last| last.tell(line(failure)));
}

fn line(error: &Error) -> CString {
    // No NUL is left in it.
    CString::new(with_variables(error.text()).replace('\0', "\\0")).unwrap_or_default()
}

/// A text of the engine, which names the native face's fields: with the variables that stand for them here.
pub(crate) fn with_variables(text: &str) -> String {
    text.replace(Making::LIMIT, MEETING_VARIABLE).replace("timeout_ms", "UNISONO_NCCL_TIMEOUT")
}

/// A place for a result, to be written when the call has succeeded.
///
/// # Safety
/// `pointer` is NULL or writable for one `T` until `'a` ends, by nobody else.
pub(crate) unsafe fn out<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut MaybeUninit<T>> {
    // SAFETY: by the contract it is NULL or writable; MaybeUninit reads nothing.
    match unsafe { pointer.cast::<MaybeUninit<T>>().as_mut() } {
        Some(place) => Ok(place),
        None => fail!(InvalidArgument, "{name} is NULL"),
    }
}

/// A text of the client.
///
/// # Safety
/// `pointer` is NULL or a C string.
pub(crate) unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: this function's contract.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_was_given_out_stays_when_a_communicators_failure_is_told() {
        remember(&Error::new(Status::Mismatch, "the call"));
        let given = ncclGetLastError(std::ptr::null_mut());
        tell(&Error::new(Status::Aborted, "the communicator"));
        assert_eq!(last_error(), "the communicator");
        // SAFETY: valid until a call fails.
        assert_eq!(unsafe { CStr::from_ptr(given) }, c"the call");
    }

    #[test]
    fn texts_of_several_communicators_stay_where_they_were_given_out() {
        let told = |text: &str| {
            tell(&Error::new(Status::Aborted, text));
            ncclGetLastError(std::ptr::null_mut())
        };
        let given = ["first", "second", "third"].map(told);
        assert_eq!(told("first"), given[0]);
        assert_eq!(last_error(), "first");
        assert_eq!(told("third"), given[2]);
        // SAFETY: valid until a call fails.
        let texts = given.map(|text| unsafe { CStr::from_ptr(text) });
        assert_eq!(texts, [c"first", c"second", c"third"]);
    }

    fn last_error() -> String {
        // SAFETY: the pointer is a C string of this thread, which no call changes before the copy is made.
        unsafe { CStr::from_ptr(ncclGetLastError(std::ptr::null_mut())) }.to_str().unwrap().to_owned()
    }

    /// Where the engine names a field of the native face.
    #[test]
    fn a_text_names_the_setting_that_there_is_here() {
        for (engine, here) in [
            ("look at it, or raise timeout_ms", "look at it, or raise UNISONO_NCCL_TIMEOUT"),
            ("it does not end. Raise timeout_ms, or", "it does not end. Raise UNISONO_NCCL_TIMEOUT, or"),
            (
                "rank 0 reports of its split(): Raise the context's timeout_ms",
                "rank 0 reports of its split(): Raise UNISONO_NCCL_MEETING_TIMEOUT",
            ),
        ] {
            remember(&Error::new(Status::Timeout, engine));
            assert_eq!(last_error(), here);
        }
    }

    #[test]
    fn a_failure_leaves_its_text_on_its_thread() {
        assert_eq!(guard(|| fail!(PeerFailed, "rank {} is gone", 3)), 6);
        assert_eq!(last_error(), "rank 3 is gone");
        assert_eq!(guard(|| Ok(SUCCESS)), 0);
        assert_eq!(last_error(), "rank 3 is gone");
        assert_eq!(std::thread::spawn(last_error).join().unwrap(), "");
    }

    #[test]
    fn a_panic_becomes_an_internal_error_with_its_text_and_place() {
        assert_eq!(guard(|| panic!("three is {}", 4)), ncclResult::ncclInternalError as ncclResult_t);
        let text = last_error();
        assert!(text.contains("three is 4") && text.contains("error.rs"), "{text}");
    }

    /// What destructors find that run when a thread ends, after those of all other thread-locals.
    struct Late(std::sync::mpsc::Sender<[String; 3]>);

    impl Drop for Late {
        fn drop(&mut self) {
            let before = last_error();
            assert_eq!(guard(|| fail!(PeerFailed, "rank {} is gone", 4)), 6);
            let failed = last_error();
            assert_eq!(guard(|| panic!("five is {}", 6)), 3);
            // The test may be over.
            let _ = self.0.send([before, failed, last_error()]);
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
            guard(|| panic!("before"));
            guard(|| fail!(PeerFailed, "rank {} is gone", 3));
        };
        std::thread::spawn(body).join().unwrap();
        let [before, failed, panicked] = told.recv().unwrap();
        assert_eq!([before.as_str(), failed.as_str()], ["rank 3 is gone", "rank 4 is gone"]);
        assert!(panicked.contains("five is 6") && panicked.contains("error.rs"), "{panicked}");
    }

    #[test]
    fn every_result_has_a_text_of_its_own() {
        let text = |number| {
            // SAFETY: a static C string.
            unsafe { CStr::from_ptr(ncclGetErrorString(number)) }.to_str().unwrap()
        };
        let texts: std::collections::BTreeSet<&str> = (-1..=8).map(text).collect();
        assert_eq!(texts.len(), 10);
        assert_eq!(text(-1), text(99));
    }
}
