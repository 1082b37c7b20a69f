//! The loaded kernels of a device.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cuda::context::Devices;
use crate::cuda::driver::FunctionHandle;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};

/// What `cuModuleLoadData` takes: the kernels of the exchange, for the devices of [`crate::cuda::kernels::IMAGE`].
pub const IMAGE: &[u8] = include_bytes!("../../../kernels/exchange.fatbin");

/// The kernels of one device, loaded once in a process and kept: unloading could wait for the device.
pub(super) struct Functions {
    combines: HashMap<&'static CStr, FunctionHandle>,
    relay: FunctionHandle,
    mover: FunctionHandle,
    mover_of_many: FunctionHandle,
    /// Whose context the module is loaded into.
    devices: Arc<Devices>,
    device: u32,
}

impl Functions {
    /// Those of a device; loads them if nobody did.
    pub(super) fn of(devices: &Arc<Devices>, device: u32) -> Result<Arc<Functions>> {
        static LOADED: Mutex<Vec<Arc<Functions>>> = Mutex::new(Vec::new());
        // The list is only ever pushed to, so a panic elsewhere leaves it whole.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let found = loaded.iter().find(|f| f.device == device && Arc::ptr_eq(&f.devices, devices));
        if let Some(found) = found {
            return Ok(found.clone());
        }
        let functions = Arc::new(Functions::load(devices, device)?);
        loaded.push(functions.clone());
        Ok(functions)
    }

    fn load(devices: &Arc<Devices>, device: u32) -> Result<Functions> {
        let _relaxed = devices.relax()?;
        let _entered = devices.enter(device)?;
        let driver = devices.driver();
        // SAFETY: a fatbin, and a context that `devices` keeps.
        let module = unsafe { driver.load_module(IMAGE) }?;
        // SAFETY: loaded above.
        let function = |name: &CStr| unsafe { driver.function(module, name) };
        let mut combines = HashMap::new();
        for dtype in DataType::ALL {
            for name in [sum(dtype), various(dtype)] {
                if !combines.contains_key(name) {
                    combines.insert(name, function(name)?);
                }
            }
        }
        Ok(Functions {
            combines,
            relay: function(c"unisono_combine_Copy_U8")?,
            mover: function(c"unisono_move")?,
            mover_of_many: function(c"unisono_move_many")?,
            devices: devices.clone(),
            device,
        })
    }

    /// Whether there is a kernel that combines so.
    pub(super) fn combines(dtype: DataType, operator: &Operator) -> bool {
        name_of(dtype, operator).is_some()
    }

    /// The kernel that combines so.
    pub(super) fn combine(&self, dtype: DataType, operator: &Operator) -> Result<FunctionHandle> {
        match name_of(dtype, operator).and_then(|name| self.combines.get(name)) {
            Some(&function) => Ok(function),
            None => fail!(Internal, "no kernel combines {} so", dtype.name()),
        }
    }

    /// The kernel that passes a root's bytes on.
    pub(super) fn relay(&self) -> FunctionHandle {
        self.relay
    }

    /// The kernel that moves bytes between pairs of ranks: few transfers, or many.
    pub(super) fn mover(&self, is_small: bool) -> FunctionHandle {
        if is_small { self.mover } else { self.mover_of_many }
    }
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions").field("device", &self.device).finish_non_exhaustive()
    }
}

/// The name of the kernel for a type and an operator. Sums have kernels of their own; for floats they divide and scale
/// too.
fn name_of(dtype: DataType, operator: &Operator) -> Option<&'static CStr> {
    match operator {
        Operator::Sum | Operator::PreMulSum(_) => Some(sum(dtype)),
        Operator::Average if dtype.is_float() => Some(sum(dtype)),
        Operator::Product | Operator::Min | Operator::Max | Operator::Average => Some(various(dtype)),
        Operator::BitAnd | Operator::BitOr | Operator::BitXor => (!dtype.is_float()).then(|| various(dtype)),
        Operator::Custom(_) => None,
    }
}

/// Where the sign makes no difference, both types of a size share a sum.
const fn sum(dtype: DataType) -> &'static CStr {
    match dtype {
        DataType::I8 | DataType::U8 => c"unisono_combine_Sum_U8",
        DataType::I32 | DataType::U32 => c"unisono_combine_Sum_U32",
        DataType::I64 | DataType::U64 => c"unisono_combine_Sum_U64",
        DataType::F16 => c"unisono_combine_Sum_F16",
        DataType::F32 => c"unisono_combine_Sum_F32",
        DataType::F64 => c"unisono_combine_Sum_F64",
        DataType::Bf16 => c"unisono_combine_Sum_Bf16",
        DataType::F8E4M3 => c"unisono_combine_Sum_F8E4M3",
        DataType::F8E5M2 => c"unisono_combine_Sum_F8E5M2",
    }
}

const fn various(dtype: DataType) -> &'static CStr {
    match dtype {
        DataType::I8 => c"unisono_combine_Various_I8",
        DataType::U8 => c"unisono_combine_Various_U8",
        DataType::I32 => c"unisono_combine_Various_I32",
        DataType::U32 => c"unisono_combine_Various_U32",
        DataType::I64 => c"unisono_combine_Various_I64",
        DataType::U64 => c"unisono_combine_Various_U64",
        DataType::F16 => c"unisono_combine_Various_F16",
        DataType::F32 => c"unisono_combine_Various_F32",
        DataType::F64 => c"unisono_combine_Various_F64",
        DataType::Bf16 => c"unisono_combine_Various_Bf16",
        DataType::F8E4M3 => c"unisono_combine_Various_F8E4M3",
        DataType::F8E5M2 => c"unisono_combine_Various_F8E5M2",
    }
}
