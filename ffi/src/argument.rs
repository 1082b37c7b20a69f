//! From C's arguments to Rust's: each conversion checks, and names the argument when it refuses.

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::time::Duration;

use unisono::deadline::Deadline;
use unisono::error::{Result, fail};
use unisono::reduce::DataType;

/// No deadline, for a timeout_ms that should never end a wait.
#[allow(unreachable_pub, reason = "for the header")]
pub const UNISONO_FOREVER: u64 = u64::MAX;

/// An options struct that starts with its size, so that programs and libraries of different versions
/// understand each other: fields are only ever added at the end, and zero means unset.
///
/// # Safety
/// Implementors are `repr(C)`, start with `size: u64`, have no padding, and are valid when all bytes are
/// zero.
pub(super) unsafe trait Options: Copy {
    /// The initialiser that the header gives.
    const INIT: &'static str;
    /// The size of its first version: no program was ever compiled with less.
    const FIRST_SIZE: u64;
}

/// Larger than any options struct will be: a size beyond it was never set.
const LARGEST_OPTIONS: u64 = 4096;

/// Copies an options struct, as much of it as both sides know.
///
/// # Safety
/// `pointer` is NULL or points to a `u64` and, if that says so, to as many readable bytes.
pub(super) unsafe fn options<T: Options>(pointer: *const T, name: &str) -> Result<Option<T>> {
    let ours = size_of::<T>();
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, so a u64 is there.
    let theirs = unsafe { pointer.cast::<u64>().read_unaligned() };
    if !(T::FIRST_SIZE..=LARGEST_OPTIONS).contains(&theirs) {
        fail!(InvalidArgument, "{name}->size is {theirs}; initialise the struct with {}", T::INIT);
    }
    // The range above fits a usize.
    let theirs = theirs as usize;
    // SAFETY: `size` says that so many bytes are readable.
    let bytes = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), theirs) };
    if bytes.get(ours..).is_some_and(|unknown| unknown.iter().any(|&b| b != 0)) {
        fail!(
            Unsupported,
            "{name} sets an option that this library ({}) does not know: it knows {ours} of {theirs} bytes",
            env!("CARGO_PKG_VERSION")
        );
    }
    let mut copy = MaybeUninit::<T>::zeroed();
    // SAFETY: source and destination hold at least the smaller of the two sizes, and the copy is ours alone.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy.as_mut_ptr().cast(), ours.min(theirs)) };
    // SAFETY: the trait says that all bytes zero are valid, and the caller filled the fields as C types them.
    Ok(Some(unsafe { copy.assume_init() }))
}

/// As [`options`], where the struct must be given.
///
/// # Safety
/// As [`options`].
pub(super) unsafe fn required_options<T: Options>(pointer: *const T, name: &str) -> Result<T> {
    // SAFETY: this function's contract.
    match unsafe { options(pointer, name) }? {
        Some(options) => Ok(options),
        None => fail!(InvalidArgument, "{name} is NULL"),
    }
}

/// A place for a result, to be written when the call has succeeded.
///
/// # Safety
/// `pointer` is NULL or writable for one `T` until `'a` ends, by nobody else.
pub(super) unsafe fn out<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut MaybeUninit<T>> {
    // SAFETY: by the contract it is NULL or writable; MaybeUninit reads nothing.
    match unsafe { pointer.cast::<MaybeUninit<T>>().as_mut() } {
        Some(place) => Ok(place),
        None => fail!(InvalidArgument, "{name} is NULL"),
    }
}

/// A text that may be absent.
///
/// # Safety
/// `pointer` is NULL or points to a C string that does not change until `'a` ends.
pub(super) unsafe fn optional_text<'a>(pointer: *const c_char, name: &str) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, so a C string by the contract.
    match unsafe { CStr::from_ptr(pointer) }.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(_) => fail!(InvalidArgument, "{name} is not UTF-8"),
    }
}

/// A text.
///
/// # Safety
/// As [`optional_text`].
pub(super) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    // SAFETY: this function's contract.
    match unsafe { optional_text(pointer, name) }? {
        Some(text) => Ok(text),
        None => fail!(InvalidArgument, "{name} is NULL"),
    }
}

/// A list of `count` items. NULL is fine for none.
///
/// # Safety
/// `pointer` is NULL or points to `count` readable items that do not change until `'a` ends.
pub(super) unsafe fn list<'a, T>(pointer: *const T, count: u64, name: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        fail!(InvalidArgument, "{name} is NULL, but its length is {count}");
    }
    if !pointer.is_aligned() {
        fail!(InvalidArgument, "{name} is not aligned to {} bytes", align_of::<T>());
    }
    match usize::try_from(count).ok().filter(|n| n.checked_mul(size_of::<T>()).is_some_and(fits_memory)) {
        // SAFETY: by the contract so many items are there; the size was checked above.
        Some(count) => Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
        None => fail!(InvalidArgument, "{name} cannot have {count} items: that is more than memory holds"),
    }
}

/// How much a buffer holds, in elements, as the call's arguments say it.
#[derive(Clone, Copy)]
pub(super) enum Extent<'a> {
    /// `count`.
    Whole(u64),
    /// `count` for each of so many ranks.
    Each(u64, u32),
    /// The entry of one rank, in the argument of this name.
    Entry(&'a str, usize, u64),
    /// A count for each rank, in the argument of this name.
    List(&'a str, &'a [u64]),
}

impl Extent<'_> {
    /// The size in bytes; more than memory can hold is an error that names the numbers.
    pub(super) fn bytes(self, dtype: DataType) -> Result<usize> {
        let count: u128 = match self {
            Extent::Whole(count) | Extent::Entry(_, _, count) => count.into(),
            Extent::Each(count, ranks) => u128::from(count) * u128::from(ranks),
            Extent::List(_, counts) => counts.iter().map(|&count| u128::from(count)).sum(),
        };
        // No overflow: 2^64 elements on 2^32 ranks, of 8 bytes each, stay below 2^128.
        let bytes = count * dtype.size() as u128;
        match usize::try_from(bytes) {
            Ok(bytes) if fits_memory(bytes) => Ok(bytes),
            _ => fail!(InvalidArgument, "{self}, of {} {bytes} bytes: more than memory holds", dtype.name()),
        }
    }

    /// A buffer of this extent. NULL is fine for nothing.
    pub(super) fn buffer(self, pointer: *const c_void, dtype: DataType, name: &str) -> Result<*mut u8> {
        let bytes = self.bytes(dtype)?;
        if bytes > 0 && pointer.is_null() {
            fail!(InvalidArgument, "{name} is NULL, but {self}");
        }
        if pointer.addr().checked_add(bytes).is_none() {
            fail!(
                InvalidArgument,
                "{name} is {pointer:p}, and {self}, of {} {bytes} bytes: past the end of the address space",
                dtype.name()
            );
        }
        Ok(pointer.cast_mut().cast())
    }
}

impl fmt::Display for Extent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Extent::Whole(count) => write!(f, "count is {count}"),
            Extent::Each(count, ranks) => write!(f, "count is {count} for each of {ranks} ranks"),
            Extent::Entry(name, rank, count) => write!(f, "{name}[{rank}] is {count}"),
            Extent::List(name, counts) => {
                let sum: u128 = counts.iter().map(|&count| u128::from(count)).sum();
                write!(f, "{name} add up to {sum}")
            }
        }
    }
}

/// No object is larger than half the address space.
fn fits_memory(bytes: usize) -> bool {
    isize::try_from(bytes).is_ok()
}

/// A timeout of zero is unset, [`UNISONO_FOREVER`] never ends.
pub(super) fn timeout(milliseconds: u64) -> Option<Duration> {
    match milliseconds {
        0 => None,
        UNISONO_FOREVER => Some(Duration::MAX),
        _ => Some(Duration::from_millis(milliseconds)),
    }
}

/// The end of a wait that was asked for by name: zero only looks.
pub(super) fn wait_deadline(milliseconds: u64) -> Deadline {
    match milliseconds {
        UNISONO_FOREVER => Deadline::NEVER,
        _ => Deadline::after(Duration::from_millis(milliseconds)),
    }
}
