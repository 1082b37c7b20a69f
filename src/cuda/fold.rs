//! The fold kernels on real devices.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CStr;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::by_device::ByDevice;
use super::context::Devices;
use super::courier::{self, Combiner, Duty, Errand};
use super::driver::{Driver, FunctionHandle, Grid, least_limit};
use super::image::Image;
use super::kernels::{self, IMAGE, Launch, MAX_OPERANDS};
use super::local::{self, Fold, Kernels};
use super::stream::Stream;
use crate::deadline::Deadline;
use crate::error::{Result, fail};
use crate::reduce::{DataType, Operand, Operator, Reducer, Representation};

/// Blocks of a launch for each multiprocessor, at most: with two they run at the memory's speed.
const BLOCKS_OF_A_MULTIPROCESSOR: u32 = 2;

/// How long loading may wait for what runs on the device.
const LOADING: Duration = Duration::from_secs(60);

const ELEMENT: Representation = Representation::Element;

/// [`IMAGE`], loaded once on each device that folds. It stays loaded: a process that once folded on a device
/// will again, and unloading waits for everything that runs there.
pub struct FoldKernels {
    loaded: ByDevice<Arc<Loaded>>,
}

/// What is loaded on one device.
struct Loaded {
    /// The most blocks of a launch.
    blocks: u32,
    functions: HashMap<&'static CStr, FunctionHandle>,
    /// By what they combine, too.
    couriers: Vec<(Option<Combiner>, FunctionHandle)>,
    /// Whether they can be launched before their turn, and wait for it.
    couriers_await: bool,
}

impl FoldKernels {
    /// Those of this machine's devices ([`Devices::open`]), the same for everybody.
    pub fn open() -> Arc<FoldKernels> {
        static KERNELS: OnceLock<Arc<FoldKernels>> = OnceLock::new();
        KERNELS.get_or_init(|| Arc::new(FoldKernels { loaded: ByDevice::new() })).clone()
    }

    /// Those of a driver double's devices, whose numbers this machine's have, too.
    #[cfg(test)]
    pub fn apart() -> Arc<FoldKernels> {
        Arc::new(FoldKernels { loaded: ByDevice::new() })
    }
}

impl Kernels for FoldKernels {
    fn prepare(
        &self,
        devices: &Arc<Devices>,
        device: u32,
        dtype: DataType,
        operator: Operator,
    ) -> Result<()> {
        name(dtype, operator)?;
        let load = || Loaded::new(devices, device).map(Arc::new);
        self.loaded.get_or_make(devices, device, load).map(drop)
    }

    fn most_operands(&self) -> usize {
        MAX_OPERANDS
    }

    unsafe fn fold(&self, devices: &Devices, fold: &Fold<'_>) -> Result<()> {
        let (name, device) = (name(fold.dtype, fold.operator)?, fold.stream.device());
        let found = self.loaded.get(devices, device);
        let Some((function, blocks)) =
            found.and_then(|loaded| Some((*loaded.functions.get(name)?, loaded.blocks)))
        else {
            fail!(Internal, "{} was not prepared on device {device}", name.to_string_lossy())
        };
        let none = Operand { address: std::ptr::null(), representation: ELEMENT, scale: 1.0 };
        let mut operands = [none; MAX_OPERANDS];
        let Some(operands) = operands.get_mut(..fold.operands.len()) else {
            fail!(Internal, "a fold of {} operands; the kernels take {MAX_OPERANDS}", fold.operands.len())
        };
        let (mut absent, mut covering) = (0, none);
        for (place, from) in fold.operands.iter().enumerate() {
            if *from == local::Operand::ABSENT {
                absent |= 1 << place;
            } else {
                covering = from.as_pointer();
            }
            operands[place] = covering;
        }
        let out = std::ptr::without_provenance_mut(fold.out as usize);
        let (representation, count) = (fold.representation, fold.count);
        let mut launch =
            Launch::new(fold.dtype, &fold.operator, fold.ranks, operands, out, representation, count)
                .without(absent);
        let kernels::Grid { blocks, threads } =
            launch.grid(fold.dtype, least_limit([blocks, fold.max_blocks]));
        let grid = Grid { blocks, threads, shared: 0, overlaps: false };
        // SAFETY: the caller's promise about the memory; the kernel takes a `Launch`, and nothing else.
        unsafe { devices.driver().launch(function, grid, fold.stream.handle(), &mut [launch.parameter()]) }
    }

    fn combiner(&self, dtype: DataType, operator: Operator) -> Option<Combiner> {
        courier::combiner(dtype, operator)
    }

    unsafe fn carry(&self, stream: &Stream, call: &courier::Call, combiner: Option<Combiner>) -> Result<()> {
        let device = stream.device();
        let found = self.loaded.get(stream.devices(), device).and_then(|loaded| {
            let found = loaded.couriers.iter().find(|(other, _)| *other == combiner);
            found.map(|(_, function)| (*function, loaded.couriers_await))
        });
        let Some((function, awaits)) = found else {
            fail!(Internal, "couriers were not prepared on device {device}")
        };
        // What the legacy stream is given waits for other streams, too, of which the kernel would not know.
        let overlaps = awaits && !stream.handle().is_legacy();
        // SAFETY: the caller's promise; the kernel waits for its stream where it may be launched before its
        // turn.
        unsafe { carry(stream.devices().driver(), function, stream, call, overlaps) }
    }
}

impl fmt::Debug for FoldKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FoldKernels")
    }
}

impl Loaded {
    /// Loads the kernels and has each run once, over nothing: the driver loads a kernel when it is first
    /// launched, and that waits for everything that runs on the device. A stream that waits for a call of
    /// ours would then wait for ever.
    fn new(devices: &Arc<Devices>, device: u32) -> Result<Loaded> {
        let driver = devices.driver();
        let image = IMAGE.of_device(driver, device)?;
        let blocks = driver.multiprocessors(device)?.max(1) * BLOCKS_OF_A_MULTIPROCESSOR;
        let began = Instant::now();
        let _relaxed = devices.relax()?;
        let _entered = devices.enter(device)?;
        // SAFETY: what was compiled for this device, whole.
        let module = unsafe { driver.load_module(image) }
            .map_err(|error| error.context(format_args!("the reduction kernels for GPU {device}")))?;
        let stream = Stream::new(devices, device, false)?;
        let mut functions = HashMap::new();
        for (dtype, operator) in kernels::all() {
            if let Entry::Vacant(entry) = functions.entry(name(dtype, operator)?) {
                // SAFETY: the module is loaded and stays so.
                let function = unsafe { driver.function(module, entry.key()) }?;
                let nothing = Operand { address: std::ptr::null(), representation: ELEMENT, scale: 1.0 };
                let mut launch =
                    Launch::new(dtype, &operator, 1, &[nothing], std::ptr::null_mut(), ELEMENT, 0);
                let grid = Grid { blocks: 1, threads: 32, shared: 0, overlaps: false };
                // SAFETY: the kernel takes a `Launch`; of no positions it touches none.
                unsafe { driver.launch(function, grid, stream.handle(), &mut [launch.parameter()]) }?;
                entry.insert(function);
            }
        }
        let mut couriers = Vec::new();
        for (image, combiners) in courier::programs() {
            // SAFETY: what was compiled for this device, whole.
            let module = unsafe { driver.load_module(image.of_device(driver, device)?) }
                .map_err(|error| error.context(format_args!("the couriers for GPU {device}")))?;
            for (combiner, name) in combiners {
                // SAFETY: the module is loaded and stays so.
                let function = unsafe { driver.function(module, &name) }?;
                // One that has nothing to do.
                let dismissed =
                    Errand::new(devices, device, Duty { combiner, ..Duty::default() })?.courier().clone();
                // SAFETY: it leaves at once.
                dismissed.launch_by(|call, _| unsafe { carry(driver, function, &stream, call, false) })?;
                couriers.push((combiner, function));
            }
        }
        stream.synchronize(Deadline::after(LOADING))?;
        log::debug!(
            "reductions on GPU {device} are loaded after {:.1} ms",
            began.elapsed().as_secs_f64() * 1e3
        );
        Ok(Loaded { blocks, functions, couriers, couriers_await: Image::awaits_streams(driver, device)? })
    }
}

/// Launches a courier.
///
/// # Safety
/// As [`Kernels::carry`]; the function is a courier, on the current device. Whether it may be launched before
/// its turn: it waits for that.
unsafe fn carry(
    driver: &dyn Driver,
    function: FunctionHandle,
    stream: &Stream,
    call: &courier::Call,
    overlaps: bool,
) -> Result<()> {
    let grid = Grid { overlaps, ..call.grid() };
    let parameter = std::ptr::from_ref(call).cast_mut().cast();
    // SAFETY: the kernel takes a `Call`, and nothing else; it is not written.
    unsafe { driver.launch(function, grid, stream.handle(), &mut [parameter]) }
}

/// The kernel's name. Refuses what the host refuses, and functions that only the host can call.
fn name(dtype: DataType, operator: Operator) -> Result<&'static CStr> {
    if let Operator::Custom(_) = operator {
        fail!(Unsupported, "the caller's own function works on host memory, not on device pointers");
    }
    match kernels::kernel(dtype, &operator) {
        Some(name) => Ok(name),
        // It says which types the operator takes.
        None => match Reducer::new(dtype, operator, 1) {
            Err(error) => Err(error),
            Ok(_) => fail!(Internal, "there is no kernel for this operator on {}", dtype.name()),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::sync::Mutex;

    use super::*;
    use crate::cuda::double::{Code, Double, Order};

    /// Kernels that do nothing but tell their grids.
    #[derive(Debug, Default)]
    struct Grids(Mutex<Vec<u32>>);

    impl Code for Grids {
        fn function(&self, name: &CStr) -> FunctionHandle {
            // Distinct in practice, which is enough: nothing is done by them.
            FunctionHandle(name.to_bytes().iter().fold(7, |all, &byte| all * 31 % 1_000_003 + byte as usize))
        }

        fn launch(&self, _: FunctionHandle, grid: Grid, _: *const c_void) {
            self.0.lock().expect("no panic").push(grid.blocks);
        }
    }

    #[test]
    fn folds_have_no_more_blocks_than_they_may() {
        let (double, grids) = (Double::new(1, Order::Eager), Arc::new(Grids::default()));
        double.shrink(132);
        double.run_code(grids.clone());
        let devices = Devices::over(double).expect("a driver");
        let kernels: Arc<dyn Kernels> = FoldKernels::apart();
        kernels.prepare(&devices, 0, DataType::U8, Operator::Sum).expect("they load");
        let stream = Stream::new(&devices, 0, false).expect("a stream");
        let _entered = devices.enter(0).expect("it is there");
        let operands = [local::Operand { address: 0x1000, representation: ELEMENT, scale: 1.0 }];
        let fold = Fold {
            stream: &stream,
            dtype: DataType::U8,
            operator: Operator::Sum,
            ranks: 1,
            operands: &operands,
            out: 0x1000,
            representation: ELEMENT,
            count: 1 << 30,
            max_blocks: 0,
        };
        let blocks = |limit: u32, max_blocks: u32| {
            let fold = Fold { max_blocks, ..fold };
            // SAFETY: nothing is launched but for its grid.
            unsafe { local::limited(kernels.clone(), limit).fold(&devices, &fold) }.expect("it is launched");
            *grids.0.lock().expect("no panic").last().expect("it was")
        };
        assert_eq!([(0, 0), (5, 0), (0, 3), (5, 3), (2, 3)].map(|(a, b)| blocks(a, b)), [264, 5, 3, 3, 2]);
        assert_eq!(blocks(1000, 0), 264);
    }
}
