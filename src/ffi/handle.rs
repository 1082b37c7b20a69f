//! Objects that C holds by pointer. The ownership is in the type: a handle is always one box, made by
//! [`Handle::into_handle`] and ended by [`Handle::take`]; what is shared is shared behind it.

use crate::error::{Result, fail};

/// An opaque C type that stands for a boxed Rust value.
pub(super) trait Handle: Sized {
    /// What the pointer really points to.
    type Inner: Send + Sync;

    /// Gives a value to C.
    fn into_handle(inner: Self::Inner) -> *mut Self {
        Box::into_raw(Box::new(inner)).cast()
    }

    /// The value behind a handle; NULL is an error that names the argument.
    ///
    /// # Safety
    /// `handle` is NULL or came from [`Handle::into_handle`] of this type and is not taken before `'a` ends.
    unsafe fn borrow<'a>(handle: *const Self, name: &str) -> Result<&'a Self::Inner> {
        // SAFETY: by the contract it is NULL or points to a live `Inner`.
        match unsafe { handle.cast::<Self::Inner>().as_ref() } {
            Some(inner) => Ok(inner),
            None => fail!(InvalidArgument, "{name} is NULL"),
        }
    }

    /// Takes the value back from C, to end it; NULL is nothing.
    ///
    /// # Safety
    /// `handle` is NULL or came from [`Handle::into_handle`] of this type; nobody uses it during or after this call.
    unsafe fn take(handle: *mut Self) -> Option<Box<Self::Inner>> {
        // SAFETY: by the contract a handle that is not NULL is a box that nobody else owns.
        (!handle.is_null()).then(|| unsafe { Box::from_raw(handle.cast()) })
    }
}

/// `handle!(unisono_x_t, Inner)`: the opaque type's conversion. The type itself is written out where it belongs, since
/// the header generator does not look inside macros.
macro_rules! handle {
    ($handle:ty, $inner:ty) => {
        impl $crate::ffi::handle::Handle for $handle {
            type Inner = $inner;
        }
    };
}
pub(super) use handle;
