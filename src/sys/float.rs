//! The floating-point environment of a thread: how it rounds, whether it flushes subnormal numbers, and which
//! of its exceptions are signals.

use std::hint::black_box;
use std::marker::PhantomData;

/// The IEEE standard's defaults, in this thread until it is dropped, whatever the caller has set: rounded to
/// nearest, subnormal numbers kept, nothing trapped. Ranks, and threads of one, differ in what they have set;
/// their results must not.
pub struct Standard {
    /// What to go back to, where that is something else.
    before: Option<Control>,
    /// It is of this thread.
    _thread: PhantomData<*const ()>,
}

impl Standard {
    /// From now on.
    #[inline]
    pub fn enter() -> Standard {
        let now = control::get();
        let before = (now & control::MATTERS != control::DEFAULT).then_some(now);
        if before.is_some() {
            // SAFETY: what every thread begins with.
            unsafe { control::set(control::DEFAULT) };
        }
        Standard { before, _thread: PhantomData }
    }
}

/// What `act` comes to by the defaults. What it computes from values that it has, and answers, is computed in
/// here: [`Standard`] by itself orders memory alone.
#[inline]
pub fn by_defaults<T>(act: impl FnOnce() -> T) -> T {
    let _standard = Standard::enter();
    let act = black_box(act);
    black_box(act())
}

impl Drop for Standard {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: what this thread had when it came to us.
            unsafe { control::set(before) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
type Control = u32;
#[cfg(not(target_arch = "x86_64"))]
type Control = u64;

#[cfg(target_arch = "x86_64")]
mod control {
    use std::arch::asm;

    /// To nearest, nothing flushed, all exceptions masked.
    pub(super) const DEFAULT: u32 = 0x1f80;
    /// All but which exceptions there have been.
    pub(super) const MATTERS: u32 = !0x3f;

    #[inline]
    pub(super) fn get() -> u32 {
        let mut now = 0_u32;
        // SAFETY: stores the register MXCSR to `now`.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut now, options(nostack, preserves_flags)) };
        now
    }

    /// # Safety
    /// Compiled code takes the default for granted: until that is back, `value` is what foreign code had set.
    #[inline]
    pub(super) unsafe fn set(value: u32) {
        // SAFETY: the value has been in the register, or is the default: no reserved bit is set.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod control {
    use std::arch::asm;

    /// To nearest, nothing flushed, no exception trapped.
    pub(super) const DEFAULT: u64 = 0;
    pub(super) const MATTERS: u64 = !0;

    #[inline]
    pub(super) fn get() -> u64 {
        let now: u64;
        // SAFETY: reads the register FPCR.
        unsafe { asm!("mrs {}, fpcr", out(reg) now, options(nostack, preserves_flags)) };
        now
    }

    /// # Safety
    /// Compiled code takes the default for granted: until that is back, `value` is what foreign code had set.
    #[inline]
    pub(super) unsafe fn set(value: u64) {
        // SAFETY: the value has been in the register, or is the default: no reserved bit is set.
        unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
    }
}

/// Of a processor whose register we do not know, what the caller has set stays.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod control {
    pub(super) const DEFAULT: u64 = 0;
    pub(super) const MATTERS: u64 = !0;

    pub(super) fn get() -> u64 {
        DEFAULT
    }

    /// # Safety
    /// None: sets nothing.
    pub(super) unsafe fn set(_value: u64) {}
}

/// Flushes subnormal numbers, on the way in and out.
#[cfg(all(test, target_arch = "x86_64"))]
const FLUSHES: u32 = 0x8040;

/// Has a thread that flushes subnormal numbers do something.
#[cfg(all(test, target_arch = "x86_64"))]
pub fn flushing<T>(act: impl FnOnce() -> T) -> T {
    let at_first = control::get();
    // SAFETY: this thread's own, until the end of the test's part.
    unsafe { control::set(at_first | FLUSHES) };
    let done = act();
    // SAFETY: what it was.
    unsafe { control::set(at_first) };
    done
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn what_the_caller_has_set_is_back_behind_it() {
        let tiny = || black_box(black_box(f32::from_bits(100)) + black_box(f32::from_bits(100)));
        let at_first = control::get();
        let number = f32::from_bits(100);
        let (flushed, kept, answered, after) = flushing(|| {
            let flushed = tiny();
            let standard = Standard::enter();
            let kept = tiny();
            drop(standard);
            (flushed, kept, by_defaults(|| number + number), control::get())
        });
        assert_eq!([flushed, kept, answered].map(f32::to_bits), [0, 200, 200]);
        assert_eq!(after & control::MATTERS, (at_first | FLUSHES) & control::MATTERS);
    }
}
