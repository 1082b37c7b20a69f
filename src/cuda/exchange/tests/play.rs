//! The kernels, compiled for this processor, and what plays launches of them: `kernels/double`.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use crate::cuda::double::Code;
use crate::cuda::driver::{FunctionHandle, Grid};

/// How adverse a run is, `Chances` of `kernels/double/machine.h`: chances in 256, and what is left out.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(in crate::cuda) struct Chances {
    /// That another thread goes on after an access.
    pub(in crate::cuda) switch: u32,
    /// That a load finds what was there before.
    pub(in crate::cuda) stale: u32,
    /// That something stored is seen by others after a turn.
    pub(in crate::cuda) commit: u32,
    /// That a rank stands still for a while when it would be somebody's turn.
    pub(in crate::cuda) freeze: u32,
    /// What does not do what it should: a mask of [`Weakness`].
    pub(in crate::cuda) without: u32,
}

/// What a run may leave out, to see that it is missed.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(in crate::cuda) enum Weakness {
    Release = 1,
    Acquire = 2,
    Fence = 4,
    WarpBarrier = 8,
    TeamBarrier = 16,
    BlockBarrier = 32,
    Line = 64,
    Stream = 256,
}

/// How a play ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
#[allow(dead_code)] // The other side makes them.
pub(in crate::cuda) enum Ending {
    /// By itself.
    Well = 0,
    /// It went on for too long, and every kernel was aborted.
    Aborted = 1,
    /// Not even then.
    Stuck = 2,
}

#[repr(C)]
struct Launch {
    entry: usize,
    call: *const c_void,
    blocks: u32,
    threads: u32,
    results: *const Output,
    count: u64,
    overlaps: u64,
}

/// Memory that is copied once a kernel has ended.
#[derive(Debug)]
#[repr(C)]
struct Output {
    from: *const u8,
    bytes: u64,
    to: *mut u8,
}

#[repr(C)]
struct Stream {
    launches: *const Launch,
    count: u64,
    abort: *mut c_void,
}

/// After so many `turns` of a thread the first rank is told to end, the others up to `apart` turns after one
/// another; when `grace` have gone by since, the play is given up.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(in crate::cuda) struct Patience {
    pub(in crate::cuda) turns: u64,
    pub(in crate::cuda) apart: u64,
    pub(in crate::cuda) grace: u64,
}

/// All at once, and as many turns again.
impl From<u64> for Patience {
    fn from(turns: u64) -> Patience {
        Patience { turns, apart: 0, grace: turns }
    }
}

type Play =
    unsafe extern "C" fn(*const Stream, u32, u64, *const Chances, *const Patience, *mut u64) -> Ending;

/// A rank's launches, in their order.
#[derive(Debug, Default)]
pub(in crate::cuda) struct Recorder {
    launches: Mutex<Vec<Recorded>>,
}

#[derive(Debug)]
struct Recorded {
    entry: usize,
    /// Aligned as parameters are.
    parameter: Vec<u128>,
    grid: Grid,
    results: Vec<Output>,
}

// SAFETY: addresses, which are looked at while a play runs.
unsafe impl Send for Recorded {}

impl Code for Recorder {
    fn function(&self, name: &CStr) -> FunctionHandle {
        let mut names = names();
        let known = names.iter().position(|known| known.as_c_str() == name);
        FunctionHandle(known.unwrap_or_else(|| {
            names.push(name.to_owned());
            names.len() - 1
        }))
    }

    fn launch(&self, function: FunctionHandle, grid: Grid, parameter: *const c_void) {
        let name = names()[function.0].clone();
        let entry = symbol(&name).unwrap_or_else(|| panic!("{name:?} is not compiled for processors"));
        let mut size = name.into_bytes();
        size.extend(b"_bytes");
        let size = symbol(&CString::new(size).expect("no zero bytes")).expect("it stands beside the kernel");
        let mut copy = vec![0u128; 0];
        // SAFETY: a constant of the library, and a parameter of that kernel, which is as long.
        unsafe {
            let bytes = *std::ptr::with_exposed_provenance::<u64>(size) as usize;
            copy.resize(bytes.div_ceil(16), 0);
            copy.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(parameter.cast(), bytes);
        }
        self.lock().push(Recorded { entry, parameter: copy, grid, results: Vec::new() });
    }
}

impl Recorder {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Recorded>> {
        self.launches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorder {
    /// Has the memory at `from` copied to `to` once the last kernel so far has ended on its rank.
    pub(in crate::cuda) fn copy_result(&self, from: u64, to: &mut [u8]) {
        let from = std::ptr::with_exposed_provenance(from as usize);
        let result = Output { from, bytes: to.len() as u64, to: to.as_mut_ptr() };
        self.lock().last_mut().expect("a launch").results.push(result);
    }
}

/// Plays what has been recorded for each rank, whose abort word is named beside it. How it ended, and how
/// often abort words were read.
///
/// # Safety
/// The memory that the launches name is there, also that for copies, and nobody else touches it.
pub(in crate::cuda) unsafe fn play(
    ranks: &[(&Recorder, *mut c_void)],
    seed: u64,
    chances: &Chances,
    patience: Patience,
) -> (Ending, u64) {
    let recorded: Vec<Vec<Recorded>> =
        ranks.iter().map(|(recorder, _)| std::mem::take(&mut *recorder.lock())).collect();
    let launch = |one: &Recorded| Launch {
        entry: one.entry,
        call: one.parameter.as_ptr().cast(),
        blocks: one.grid.blocks,
        threads: one.grid.threads,
        results: one.results.as_ptr(),
        count: one.results.len() as u64,
        overlaps: u64::from(one.grid.overlaps),
    };
    let launches: Vec<Vec<Launch>> = recorded.iter().map(|rank| rank.iter().map(launch).collect()).collect();
    let streams: Vec<Stream> = launches
        .iter()
        .zip(ranks)
        .map(|(launches, &(_, abort))| Stream {
            launches: launches.as_ptr(),
            count: launches.len() as u64,
            abort,
        })
        .collect();
    let address = symbol(c"unisono_play").expect("kernels/double has it");
    // SAFETY: that function has this type.
    let function = unsafe { std::mem::transmute::<usize, Play>(address) };
    let mut asked = 0;
    let (first, count) = (streams.as_ptr(), streams.len() as u32);
    // SAFETY: the caller's promise; at most eight ranks.
    let ending = unsafe { function(first, count, seed, chances, &raw const patience, &raw mut asked) };
    if ending == Ending::Stuck {
        // Its threads are left behind.
        std::mem::forget(recorded);
    }
    (ending, asked)
}

/// The names that were asked for; a function's handle is the place of its name.
fn names() -> std::sync::MutexGuard<'static, Vec<CString>> {
    static NAMES: Mutex<Vec<CString>> = Mutex::new(Vec::new());
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn symbol(name: &CStr) -> Option<usize> {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        let path = compiled();
        let path = CString::new(path.into_os_string().into_encoded_bytes()).expect("a path has no zero byte");
        // SAFETY: a library without initialisers, which stays loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{path:?} loads");
        handle.expose_provenance()
    });
    // SAFETY: a handle from `dlopen` and a C string.
    let address = unsafe { libc::dlsym(std::ptr::with_exposed_provenance_mut(library), name.as_ptr()) };
    (!address.is_null()).then(|| address.expose_provenance())
}

/// The library, beside the tests; compiled unless it is newer than every source.
fn compiled() -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let library = std::env::current_exe().expect("a path").with_file_name("libunisono_double_kernels.so");
    let changed = |path: &Path| path.metadata().and_then(|data| data.modified()).ok();
    let latest = [sources.clone(), sources.join("double")]
        .iter()
        .flat_map(|folder| folder.read_dir().expect("kernels/ is there"))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension() != Some(OsStr::new("xz")))
        .filter_map(|path| changed(&path))
        .max();
    if changed(&library) >= latest.or(Some(SystemTime::UNIX_EPOCH)) {
        return library;
    }
    let fresh = library.with_extension(format!("{}.so", std::process::id()));
    let status = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()))
        .args([
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
            "-pthread",
            "-shared",
            "-fPIC",
            "-o",
        ])
        .args([&fresh, &sources.join("double/kernels.cpp")])
        .status()
        .expect("a C++ compiler");
    assert!(status.success(), "kernels/double/kernels.cpp compiles");
    std::fs::rename(&fresh, &library).expect("the same folder");
    library
}
