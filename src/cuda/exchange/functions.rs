//! The loaded kernels of a device.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CStr;
use std::fmt;
use std::sync::Arc;

use super::Job;
use crate::cuda::by_device::ByDevice;
use crate::cuda::context::Devices;
use crate::cuda::driver::FunctionHandle;
use crate::cuda::image::{Image, Program};
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};
use crate::signature::Kind;

/// The kernels.
pub(in crate::cuda) static IMAGE: Image = Image::new(
    Program::Exchange,
    include_bytes!("../../../kernels/exchange.sm_90.xz"),
    include_bytes!("../../../kernels/exchange.sm_100.xz"),
);

/// The same for broadcasts by stages.
pub(in crate::cuda) static STAGES: Image = Image::new(
    Program::Stages,
    include_bytes!("../../../kernels/stages.sm_90.xz"),
    include_bytes!("../../../kernels/stages.sm_100.xz"),
);

/// The same for calls in windows, and for signals.
pub(in crate::cuda) static WINDOWED: Image = Image::new(
    Program::Windowed,
    include_bytes!("../../../kernels/windowed.sm_90.xz"),
    include_bytes!("../../../kernels/windowed.sm_100.xz"),
);

/// The kernels of an operator and a type: by lines, by tiles, in windows.
macro_rules! names {
    ($name:literal) => {
        Names {
            lines: cstr(concat!("unisono_lines_", $name, "\0")),
            tiles: cstr(concat!("unisono_tiles_", $name, "\0")),
            windowed: cstr(concat!("unisono_windowed_", $name, "\0")),
        }
    };
}

/// The kernels for several calls at once of an operator and a type: by lines, by tiles.
macro_rules! several {
    ($name:literal) => {
        [
            cstr(concat!("unisono_several_lines_", $name, "\0")),
            cstr(concat!("unisono_several_tiles_", $name, "\0")),
        ]
    };
}

/// The kernel for sums of a type whose pieces are dealt out to the blocks.
macro_rules! dealt {
    ($name:literal) => {
        cstr(concat!("unisono_dealt_", $name, "\0"))
    };
}

/// The kernels of one operator and type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Combiners {
    pub(super) staged: Pair,
    pub(super) windowed: FunctionHandle,
}

/// The kernels that exchange through arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) lines: FunctionHandle,
    pub(super) tiles: FunctionHandle,
}

/// Their names.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Names {
    lines: &'static CStr,
    tiles: &'static CStr,
    windowed: &'static CStr,
}

/// The kernels of one device, loaded once in a process and kept, with the devices: unloading could wait for
/// the device.
pub(super) struct Functions {
    /// By the number of the type: those of its sums, and of all else.
    combines: Vec<[Combiners; 2]>,
    /// By the number of the type, for sums whose pieces are dealt out.
    dealt: Vec<Option<FunctionHandle>>,
    relay: Pair,
    swapper: FunctionHandle,
    /// For several calls at once: sums, by the number of the type; broadcasts; what swaps.
    several: Vec<Option<Pair>>,
    several_relays: Pair,
    several_swaps: FunctionHandle,
    mover: FunctionHandle,
    mover_of_many: FunctionHandle,
    pull: FunctionHandle,
    signal: FunctionHandle,
    await_signals: FunctionHandle,
    windowed: FunctionHandle,
    /// See [`Image::awaits_streams`].
    await_streams: bool,
}

impl Functions {
    /// Those of a device; loads them if nobody did.
    pub(super) fn of(devices: &Arc<Devices>, device: u32) -> Result<Arc<Functions>> {
        static LOADED: ByDevice<Arc<Functions>> = ByDevice::new();
        LOADED.get_or_make(devices, device, || Functions::load(devices, device).map(Arc::new))
    }

    fn load(devices: &Arc<Devices>, device: u32) -> Result<Functions> {
        let driver = devices.driver();
        let image = IMAGE.of_device(driver, device)?;
        let _relaxed = devices.relax()?;
        let _entered = devices.enter(device)?;
        // SAFETY: what was compiled for this device, whole, and a context that `devices` keeps.
        let module = unsafe { driver.load_module(image) }?;
        // SAFETY: as above.
        let stages = unsafe { driver.load_module(STAGES.of_device(driver, device)?) }?;
        // SAFETY: as above.
        let windowed = unsafe { driver.load_module(WINDOWED.of_device(driver, device)?) }?;
        // Now, not when it is launched first: a stream may wait for the host then, and the driver for that
        // stream. SAFETY: modules that are loaded and stay so.
        let loaded = |module, name: &CStr| unsafe {
            let function = driver.function(module, name)?;
            driver.load_function(function)?;
            Ok(function)
        };
        let function = |name: &CStr| loaded(module, name);
        let in_windows = |name: &CStr| loaded(windowed, name);
        let pair = |[lines, tiles]: [&CStr; 2]| -> Result<Pair> {
            Ok(Pair { lines: function(lines)?, tiles: function(tiles)? })
        };
        let combiners = |names: Names| -> Result<Combiners> {
            Ok(Combiners { staged: pair([names.lines, names.tiles])?, windowed: in_windows(names.windowed)? })
        };
        let mut known = HashMap::new();
        let mut once = |names: Names| match known.entry(names) {
            Entry::Occupied(entry) => Ok(*entry.get()),
            Entry::Vacant(entry) => combiners(names).map(|made| *entry.insert(made)),
        };
        let (mut combines, mut several, mut dealt) = (Vec::new(), Vec::new(), Vec::new());
        for dtype in DataType::ALL {
            combines.push([once(sum(dtype))?, once(various(dtype))?]);
            several.push(sum_of_several(dtype).map(pair).transpose()?);
            dealt.push(dealt_sum(dtype).map(function).transpose()?);
        }
        Ok(Functions {
            combines,
            dealt,
            several,
            several_relays: pair(several!("Copy_U8"))?,
            several_swaps: function(c"unisono_several_swap")?,
            relay: pair([c"unisono_lines_Copy_U8", c"unisono_tiles_Copy_U8"])?,
            swapper: function(c"unisono_swap")?,
            mover: function(c"unisono_move")?,
            mover_of_many: function(c"unisono_move_many")?,
            pull: loaded(stages, c"unisono_pull")?,
            signal: in_windows(c"unisono_signal")?,
            await_signals: in_windows(c"unisono_await_signals")?,
            windowed: in_windows(c"unisono_windowed")?,
            await_streams: Image::awaits_streams(driver, device)?,
        })
    }

    /// Whether there are kernels that combine so.
    pub(super) fn combines(dtype: DataType, operator: &Operator) -> bool {
        family(dtype, operator).is_some()
    }

    /// The kernels that combine so.
    pub(super) fn combine(&self, dtype: DataType, operator: &Operator) -> Result<Combiners> {
        match family(dtype, operator) {
            Some(family) => Ok(self.combines[dtype as usize][family as usize]),
            None => fail!(Internal, "no kernel combines {} so", dtype.name()),
        }
    }

    /// Whether sums of this type may have their pieces dealt out to the blocks.
    pub(super) fn deals(dtype: DataType) -> bool {
        dealt_sum(dtype).is_some()
    }

    /// The kernel that sums so.
    pub(super) fn dealt(&self, dtype: DataType) -> Result<FunctionHandle> {
        match self.dealt[dtype as usize] {
            Some(function) => Ok(function),
            None => fail!(Internal, "no kernel sums {} by pieces that are dealt out", dtype.name()),
        }
    }

    /// The kernels that pass a root's bytes on.
    pub(super) fn relay(&self) -> Pair {
        self.relay
    }

    /// The kernels for several calls like this one, which combines, if there are some.
    pub(super) fn several(&self, job: &Job) -> Option<Pair> {
        match job.kind {
            Kind::Broadcast => Some(self.several_relays()),
            _ if family(job.dtype, &job.operator) != Some(Family::Sum) => None,
            _ => self.several[job.dtype as usize],
        }
    }

    /// The kernels that pass the bytes of several roots on.
    pub(super) fn several_relays(&self) -> Pair {
        self.several_relays
    }

    /// The kernel that swaps for several calls.
    pub(super) fn several_swaps(&self) -> FunctionHandle {
        self.several_swaps
    }

    /// The kernel that swaps short parts between all.
    pub(super) fn swapper(&self) -> FunctionHandle {
        self.swapper
    }

    /// The kernel of broadcasts by stages.
    pub(super) fn pull(&self) -> FunctionHandle {
        self.pull
    }

    /// The kernel that sends signals.
    pub(super) fn signal(&self) -> FunctionHandle {
        self.signal
    }

    /// The kernel that waits for them.
    pub(super) fn await_signals(&self) -> FunctionHandle {
        self.await_signals
    }

    /// Whether the kernel of broadcasts by stages may be launched before what is ahead of it has ended.
    pub(super) fn await_streams(&self) -> bool {
        self.await_streams
    }

    /// The kernel of calls in windows that only move.
    pub(super) fn windowed(&self) -> FunctionHandle {
        self.windowed
    }

    /// The kernel that moves bytes between pairs of ranks: few transfers, or many.
    pub(super) fn mover(&self, is_small: bool) -> FunctionHandle {
        if is_small { self.mover } else { self.mover_of_many }
    }
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions").finish_non_exhaustive()
    }
}

/// What a type has kernels for. Sums have kernels of their own; for floats they divide and scale too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Sum = 0,
    Various = 1,
}

fn family(dtype: DataType, operator: &Operator) -> Option<Family> {
    match operator {
        Operator::Sum | Operator::PreMulSum(_) => Some(Family::Sum),
        Operator::Average if dtype.is_float() => Some(Family::Sum),
        Operator::Product | Operator::Min | Operator::Max | Operator::Average => Some(Family::Various),
        Operator::BitAnd | Operator::BitOr | Operator::BitXor => {
            (!dtype.is_float()).then_some(Family::Various)
        }
        Operator::Custom(_) => None,
    }
}

/// The kernels for several sums at once: of what groups of calls sum most.
const fn sum_of_several(dtype: DataType) -> Option<[&'static CStr; 2]> {
    match dtype {
        DataType::F16 => Some(several!("Sum_F16")),
        DataType::F32 => Some(several!("Sum_F32")),
        DataType::F64 => Some(several!("Sum_F64")),
        DataType::Bf16 => Some(several!("Sum_Bf16")),
        DataType::I32 | DataType::U32 => Some(several!("Sum_U32")),
        DataType::I64 | DataType::U64 => Some(several!("Sum_U64")),
        _ => None,
    }
}

/// The same for sums whose pieces are dealt out.
const fn dealt_sum(dtype: DataType) -> Option<&'static CStr> {
    match dtype {
        DataType::F16 => Some(dealt!("F16")),
        DataType::F32 => Some(dealt!("F32")),
        DataType::F64 => Some(dealt!("F64")),
        DataType::Bf16 => Some(dealt!("Bf16")),
        DataType::I32 | DataType::U32 => Some(dealt!("U32")),
        DataType::I64 | DataType::U64 => Some(dealt!("U64")),
        DataType::I8 | DataType::U8 | DataType::F8E4M3 | DataType::F8E5M2 => None,
    }
}

const fn cstr(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("names end with a zero byte and have no other"),
    }
}

/// Where the sign makes no difference, both types of a size share a sum.
const fn sum(dtype: DataType) -> Names {
    match dtype {
        DataType::I8 | DataType::U8 => names!("Sum_U8"),
        DataType::I32 | DataType::U32 => names!("Sum_U32"),
        DataType::I64 | DataType::U64 => names!("Sum_U64"),
        DataType::F16 => names!("Sum_F16"),
        DataType::F32 => names!("Sum_F32"),
        DataType::F64 => names!("Sum_F64"),
        DataType::Bf16 => names!("Sum_Bf16"),
        DataType::F8E4M3 => names!("Sum_F8E4M3"),
        DataType::F8E5M2 => names!("Sum_F8E5M2"),
    }
}

const fn various(dtype: DataType) -> Names {
    match dtype {
        DataType::I8 => names!("Various_I8"),
        DataType::U8 => names!("Various_U8"),
        DataType::I32 => names!("Various_I32"),
        DataType::U32 => names!("Various_U32"),
        DataType::I64 => names!("Various_I64"),
        DataType::U64 => names!("Various_U64"),
        DataType::F16 => names!("Various_F16"),
        DataType::F32 => names!("Various_F32"),
        DataType::F64 => names!("Various_F64"),
        DataType::Bf16 => names!("Various_Bf16"),
        DataType::F8E4M3 => names!("Various_F8E4M3"),
        DataType::F8E5M2 => names!("Various_F8E5M2"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::double::{Double, Order};
    use crate::cuda::fold::FoldKernels;
    use crate::cuda::local::Kernels;

    /// The driver may wait for the device when a kernel is launched first, and the device for a call of ours.
    #[test]
    fn no_kernel_of_ours_is_loaded_when_it_is_launched_first() {
        let double = Double::new(1, Order::RoundRobin);
        double.load_modules();
        let devices = Devices::over(double.clone()).expect("a driver");
        Functions::of(&devices, 0).expect("they load");
        FoldKernels::apart().prepare(&devices, 0, DataType::U8, Operator::Sum).expect("they load");
        assert_eq!(double.unloaded(), Vec::<String>::new());
    }
}
