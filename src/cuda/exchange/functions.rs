//! The loaded kernels of a device.

use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cuda::context::Devices;
use crate::cuda::driver::FunctionHandle;
use crate::cuda::kernels;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operator};

/// What `cuModuleLoadData` takes: the kernels of the exchange, for the devices of [`kernels::IMAGE`].
pub const IMAGE: &[u8] = include_bytes!("../../../kernels/exchange.fatbin");

/// The kernels of one device, loaded once in a process and kept: unloading could wait for the device.
pub(super) struct Functions {
    /// By the name of the fold's kernel that combines alike.
    combines: HashMap<CString, FunctionHandle>,
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
        let function = |name: &CString| unsafe { driver.function(module, name) };
        let mut combines = HashMap::new();
        for dtype in DataType::ALL {
            for operator in OPERATORS {
                let Some(fold) = kernels::kernel(dtype, &operator) else { continue };
                if !combines.contains_key(fold) {
                    combines.insert(fold.to_owned(), function(&renamed(fold.to_bytes()))?);
                }
            }
        }
        Ok(Functions {
            combines,
            relay: function(&c"unisono_combine_Copy_U8".to_owned())?,
            mover: function(&c"unisono_move".to_owned())?,
            mover_of_many: function(&c"unisono_move_many".to_owned())?,
            devices: devices.clone(),
            device,
        })
    }

    /// Whether there is a kernel that combines so.
    pub(super) fn combines(dtype: DataType, operator: &Operator) -> bool {
        kernels::kernel(dtype, operator).is_some()
    }

    /// The kernel that combines so.
    pub(super) fn combine(&self, dtype: DataType, operator: &Operator) -> Result<FunctionHandle> {
        match kernels::kernel(dtype, operator).and_then(|fold| self.combines.get(fold)) {
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

/// Every operator that has kernels.
const OPERATORS: [Operator; 8] = [
    Operator::Sum,
    Operator::Product,
    Operator::Min,
    Operator::Max,
    Operator::Average,
    Operator::BitAnd,
    Operator::BitOr,
    Operator::BitXor,
];

/// The name of the kernel here for that of the fold's.
fn renamed(fold: &[u8]) -> CString {
    let combination = String::from_utf8_lossy(fold).replace("_fold_", "_combine_");
    // It was a C string before, so it has no zero byte.
    CString::new(combination).expect("a name without zero bytes")
}
