//! Panics do not leave the library: where its faces are entered, one becomes an error.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::mem::{self, ManuallyDrop};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use crate::error::{Error, Result, Status};

thread_local! {
    /// Whether this thread is inside [`caught`], and where its panic began. Neither has a destructor: what is
    /// called while the thread or the process ends may panic, too. The place is kept only until the panic has
    /// been caught.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
    static PANICKED_AT: RefCell<ManuallyDrop<String>> = const { RefCell::new(ManuallyDrop::new(String::new())) };
}

/// Runs `body`; a panic becomes an error, with its text and place.
pub fn caught<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    keep_quiet();
    let outer = GUARDED.replace(true);
    // A panic may leave the objects it passed through half changed. Their locks are poisoned then and later
    // calls on them fail too; nothing here looks inside.
    let outcome = panic::catch_unwind(AssertUnwindSafe(body));
    GUARDED.set(outer);
    outcome.unwrap_or_else(|payload| Err(error(payload)))
}

/// Once for the process: a panic hook that prints nothing of panics that are caught here.
fn keep_quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                return previous(info);
            }
            let at = info.location().map(ToString::to_string).unwrap_or_default();
            log::error!("panic at {at}");
            PANICKED_AT.with_borrow_mut(|place| **place = at);
        }));
    });
}

fn error(payload: Box<dyn Any + Send>) -> Error {
    let text = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "a panic without a text".to_owned(),
    };
    // Dropping a payload may panic again, with another payload: that one is leaked.
    if let Err(again) = panic::catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        mem::forget(again);
    }
    let at = PANICKED_AT.with_borrow_mut(|place| mem::take(&mut **place));
    Error::new(Status::Internal, format!("a bug in unisono, please report it: {text} ({at})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_internal_error_with_its_text_and_place() {
        let error = caught::<()>(|| panic!("three is {}", 4)).unwrap_err();
        assert_eq!(error.status(), Status::Internal);
        assert!(error.text().contains("three is 4"), "{error}");
        assert!(error.text().contains("panics.rs"), "{error}");
    }

    #[test]
    fn a_payload_that_panics_when_dropped_is_contained() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("the payload's own panic");
            }
        }
        let error = caught::<()>(|| panic::panic_any(Bomb)).unwrap_err();
        assert_eq!(error.status(), Status::Internal);
    }
}
