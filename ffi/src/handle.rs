//! Objects that C holds by pointer. The ownership is in the type: a handle is always one box, made by
//! [`Handle::into_handle`] and ended by [`Handle::take`]; what is shared is shared behind it.
//!
//! Each box begins with a tag of its type, since C, and even more so Python, mixes handles up: one of another
//! type is an error. A handle that has been destroyed is one as well for as long as nobody else has its
//! memory. And in a forked child what has links belongs to the parent: its locks may be held by threads that
//! do not exist.

use unisono::error::{Result, fail};
use unisono::sys::fork;

/// An opaque C type that stands for a boxed Rust value.
pub(super) trait Handle: Sized {
    /// What the pointer really points to, behind its tag.
    type Inner: Send + Sync;
    /// The type as C names it.
    const NAME: &'static str;
    /// Whether it is of use in a forked child, too.
    const SURVIVES_FORK: bool;
    /// The tag of its boxes.
    const TAG: u64 = tag(Self::NAME);

    /// Gives a value to C.
    fn into_handle(inner: Self::Inner) -> *mut Self {
        Box::into_raw(Box::new(Tagged { tag: Self::TAG, fork: fork::generation(), inner })).cast()
    }

    /// The value behind a handle; NULL, a handle of another type, or of the parent of this process, is an
    /// error that names the argument.
    ///
    /// # Safety
    /// `handle` is NULL or came from [`Handle::into_handle`], of whichever type, and is not taken before `'a`
    /// ends.
    unsafe fn borrow<'a>(handle: *const Self, name: &str) -> Result<&'a Self::Inner> {
        // SAFETY: this function's contract.
        let tagged = unsafe { check(handle, name) }?;
        if !Self::SURVIVES_FORK && tagged.fork != fork::generation() {
            fail!(
                InvalidUsage,
                "{name} was made before a fork and belongs to the parent of this process. Make contexts after forking"
            );
        }
        Ok(&tagged.inner)
    }

    /// As [`Handle::borrow`], for what never changes and can be told in a forked child, too.
    ///
    /// # Safety
    /// As there.
    unsafe fn look<'a>(handle: *const Self, name: &str) -> Result<&'a Self::Inner> {
        // SAFETY: this function's contract.
        unsafe { check(handle, name) }.map(|tagged| &tagged.inner)
    }

    /// Takes the value back from C, to end it; NULL is nothing.
    ///
    /// # Safety
    /// `handle` is NULL or came from [`Handle::into_handle`], of whichever type; nobody uses it during or
    /// after this call.
    unsafe fn take(handle: *mut Self, name: &str) -> Result<Option<Box<Tagged<Self::Inner>>>> {
        if handle.is_null() {
            return Ok(None);
        }
        // SAFETY: this function's contract.
        unsafe { check(handle, name) }?;
        let handle = handle.cast::<Tagged<Self::Inner>>();
        // SAFETY: `check` says that it is a live box of this type, and the caller that nobody else uses it.
        // The write is volatile since only calls after the end of the box may see it.
        unsafe {
            (&raw mut (*handle).tag).write_volatile(ENDED);
            Ok(Some(Box::from_raw(handle)))
        }
    }
}

/// A value behind the tag of the C type that stands for it.
#[repr(C)]
pub(super) struct Tagged<T> {
    tag: u64,
    /// In which generation of forks it was made.
    fork: u32,
    inner: T,
}

/// The tag of what has been destroyed.
pub(super) const ENDED: u64 = 0xdead_dead_dead_dead;

/// That `handle` is what its type says.
///
/// # Safety
/// `handle` is NULL or came from [`Handle::into_handle`], of whichever type, and is not taken before `'a`
/// ends.
unsafe fn check<'a, H: Handle>(handle: *const H, name: &str) -> Result<&'a Tagged<H::Inner>> {
    if handle.is_null() {
        fail!(InvalidArgument, "{name} is NULL");
    }
    let tagged = handle.cast::<u64>();
    if !tagged.is_aligned() {
        fail!(InvalidArgument, "{name} is no {}", H::NAME);
    }
    // SAFETY: what into_handle gives begins with its tag, whichever the type. Volatile, since a caller who
    // breaks the contract with a handle that has been destroyed should rather meet the tag of that.
    match unsafe { tagged.read_volatile() } {
        // SAFETY: the tag says that it is a live box of this type.
        found if found == H::TAG => Ok(unsafe { &*handle.cast() }),
        ENDED => fail!(InvalidArgument, "{name} has been destroyed: it is no {} any more", H::NAME),
        _ => fail!(InvalidArgument, "{name} is no {}, or has been destroyed", H::NAME),
    }
}

/// A number for a name: 64 bits of FNV-1a.
pub(super) const fn tag(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let (mut hash, mut index) = (0xcbf2_9ce4_8422_2325, 0);
    while index < bytes.len() {
        hash = (hash ^ bytes[index] as u64).wrapping_mul(0x0100_0000_01b3);
        index += 1;
    }
    hash
}

/// `handle!(unisono_x_t, Inner)`: the opaque type's conversion, with `survives_fork` after it for one that
/// does. The type itself is written out where it belongs, since the header generator does not look inside
/// macros.
macro_rules! handle {
    ($handle:ident, $inner:ty) => {
        handle!($handle, $inner, false);
    };
    ($handle:ident, $inner:ty, survives_fork) => {
        handle!($handle, $inner, true);
    };
    ($handle:ident, $inner:ty, $survives:literal) => {
        impl super::handle::Handle for $handle {
            type Inner = $inner;
            const NAME: &'static str = stringify!($handle);
            const SURVIVES_FORK: bool = $survives;
        }
    };
}
pub(super) use handle;
