//! Libraries with NCCL's ABI, opened at run time. Types and numbers of the ABI are declared here.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::collective::request::{Counts, Kind, Request};
use crate::cuda::driver::StreamHandle;
use crate::error::{Error, Result, Status, fail};
use crate::reduce::{DataType, Operator};

/// `ncclUniqueId`, which travels by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

type Comm = *mut c_void;
type Stream = *mut c_void;
type Window = *mut c_void;

/// `NCCL_WIN_COLL_SYMMETRIC`: a window that has the same place on every rank.
const SYMMETRIC: c_int = 1;

/// Declares the functions of a library and how they are found. Optional ones may be missing.
macro_rules! functions {
    (
        needed { $($name:ident: $symbol:literal ($($argument:ty),*);)* }
        optional { $($maybe:ident: $other:literal ($($given:ty),*);)* }
    ) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            $($maybe: Option<unsafe extern "C" fn($($given),*) -> c_int>,)*
            last_error: Option<unsafe extern "C" fn(Comm) -> *const c_char>,
        }

        impl Functions {
            /// # Safety
            /// `library` is open, stays so, and gives the names of NCCL's functions to functions of NCCL's
            /// types.
            unsafe fn resolve(library: *mut c_void) -> Result<Functions> {
                // SAFETY: the library is open, and the names end with a zero.
                let find = |name: &CStr| unsafe { libc::dlsym(library, name.as_ptr()) };
                // SAFETY: the caller's promise, for every one of them.
                unsafe {
                    Ok(Functions {
                        $($name: match find($symbol) {
                            symbol if symbol.is_null() => {
                                fail!(InvalidArgument, "it has no {}", $symbol.to_string_lossy())
                            }
                            symbol => std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) -> c_int,
                            >(symbol),
                        },)*
                        $($maybe: match find($other) {
                            symbol if symbol.is_null() => None,
                            symbol => Some(std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($given),*) -> c_int,
                            >(symbol)),
                        },)*
                        last_error: match find(c"ncclGetLastError") {
                            symbol if symbol.is_null() => None,
                            symbol => Some(std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn(Comm) -> *const c_char,
                            >(symbol)),
                        },
                    })
                }
            }
        }
    };
}

functions! {
    needed {
        version: c"ncclGetVersion" (*mut c_int);
        unique_id: c"ncclGetUniqueId" (*mut UniqueId);
        init: c"ncclCommInitRank" (*mut Comm, c_int, UniqueId, c_int);
        destroy: c"ncclCommDestroy" (Comm);
        abort: c"ncclCommAbort" (Comm);
        allreduce: c"ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
        reduce: c"ncclReduce" (*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, Stream);
        broadcast: c"ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
        allgather: c"ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Comm, Stream);
        reduce_scatter: c"ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
        send: c"ncclSend" (*const c_void, usize, c_int, c_int, Comm, Stream);
        receive: c"ncclRecv" (*mut c_void, usize, c_int, c_int, Comm, Stream);
        group_start: c"ncclGroupStart" ();
        group_end: c"ncclGroupEnd" ();
    }
    optional {
        allocate: c"ncclMemAlloc" (*mut *mut c_void, usize);
        free: c"ncclMemFree" (*mut c_void);
        register: c"ncclCommWindowRegister" (Comm, *mut c_void, usize, *mut Window, c_int);
        deregister: c"ncclCommWindowDeregister" (Comm, Window);
        alltoall: c"ncclAlltoAll" (*const c_void, *mut c_void, usize, c_int, Comm, Stream);
    }
}

/// A library that is open until the process ends.
pub(super) struct Library {
    name: String,
    path: PathBuf,
    /// The loader's, as a number: libraries that are one have the same.
    handle: usize,
    functions: Functions,
}

impl Library {
    /// Opens the library at `path`, which errors call `name`. A path without a slash is looked up as the
    /// loader does.
    ///
    /// # Safety
    /// It is a library with NCCL's ABI, or none that has one of its names.
    pub(super) unsafe fn open(name: &str, path: &Path) -> Result<Arc<Library>> {
        let Ok(text) = CString::new(path.as_os_str().as_bytes()) else {
            fail!(InvalidArgument, "--library: a path holds no zero byte");
        };
        // SAFETY: a C string; its constructors are those of a library that is made for being loaded.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: NULL, or a C string until this thread's next call of the loader.
            let cause = unsafe { copied(libc::dlerror()) }.unwrap_or_else(|| "no reason given".to_owned());
            fail!(InvalidArgument, "--library {}: it cannot be opened: {cause}", path.display());
        }
        // SAFETY: open, never closed; the caller's promise.
        let functions = unsafe { Functions::resolve(handle) }
            .map_err(|error| error.context(format_args!("--library {}", path.display())))?;
        let (name, path) = (name.to_owned(), path.to_owned());
        Ok(Arc::new(Library { name, path, handle: handle.addr(), functions }))
    }

    /// Refuses this library where `earlier` is the same one by another path: it would be compared with
    /// itself.
    pub(super) fn check_apart(&self, earlier: &Library) -> Result<()> {
        if self.handle == earlier.handle && self.path != earlier.path {
            let (path, other) = (self.path.display(), earlier.path.display());
            fail!(
                InvalidArgument,
                "--library {path}: it is the library that was opened as {other}; give the whole path of another file: \
                 by a name alone the loader gives what is loaded under it already, and a link is what it leads to"
            );
        }
        Ok(())
    }

    /// As NCCL writes it: 2.28.9.
    pub(super) fn version(&self) -> Result<String> {
        let mut number = 0;
        // SAFETY: fills the number.
        self.check("ncclGetVersion", unsafe { (self.functions.version)(&raw mut number) })?;
        // Before 2.9 the major number had another place; nobody has those.
        Ok(format!("{}.{}.{}", number / 10000, number / 100 % 100, number % 100))
    }

    /// A new one, for one communicator.
    pub(super) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: fills the bytes.
        self.check("ncclGetUniqueId", unsafe { (self.functions.unique_id)(&raw mut id) })?;
        Ok(id)
    }

    fn check(&self, call: &str, result: c_int) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: a NULL communicator is allowed; the answer is NULL or a C string of the library.
        let text = self.functions.last_error.and_then(|ask| unsafe { copied(ask(std::ptr::null_mut())) });
        let text = text.filter(|text| !text.is_empty()).unwrap_or_else(|| "it says no more".to_owned());
        Err(Error::new(Status::InvalidUsage, format!("{}: {call} answered {result}: {text}", self.name)))
    }
}

/// A rank's communicator.
pub(super) struct Communicator {
    library: Arc<Library>,
    handle: Comm,
    rank: u32,
    size: u32,
    /// Memory of the library's own, each with its window.
    windows: Vec<(*mut c_void, Window)>,
    /// Whether operations may be stuck, so that its end must not wait for them.
    stuck: bool,
}

impl Communicator {
    /// Meets the other ranks. The rank's device is current.
    pub(super) fn new(library: &Arc<Library>, id: UniqueId, rank: u32, size: u32) -> Result<Communicator> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: fills the handle.
        let result = unsafe { (library.functions.init)(&raw mut handle, size as c_int, id, rank as c_int) };
        library.check("ncclCommInitRank", result)?;
        Ok(Communicator { library: library.clone(), handle, rank, size, windows: Vec::new(), stuck: true })
    }

    /// Device memory of `bytes` bytes in a symmetric window, there for as long as the communicator. Every
    /// rank calls this.
    pub(super) fn window(&mut self, bytes: usize) -> Result<u64> {
        let calls = &self.library.functions;
        let (Some(allocate), Some(register)) = (calls.allocate, calls.register) else {
            fail!(Unsupported, "{}: it has no windows", self.library.name);
        };
        let (mut memory, mut window) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: fills the pointer.
        self.library.check("ncclMemAlloc", unsafe { allocate(&raw mut memory, bytes.max(1)) })?;
        // SAFETY: memory that was allocated for it, so large; fills the window.
        let result = unsafe { register(self.handle, memory, bytes.max(1), &raw mut window, SYMMETRIC) };
        // It is freed with the others, registered or not.
        self.windows.push((memory, window));
        self.library.check("ncclCommWindowRegister", result)?;
        Ok(memory.expose_provenance() as u64)
    }

    pub(super) fn library(&self) -> &Library {
        &self.library
    }

    /// Everything that was enqueued is done, and nothing more comes.
    pub(super) fn settle(&mut self) {
        self.stuck = false;
    }

    /// Enqueues the call. Refuses what the library has no function for.
    ///
    /// # Safety
    /// The buffers are device memory as the request says, and nobody races with the stream for them; the
    /// stream is of the rank's device, which is current.
    pub(super) unsafe fn run(&self, request: &Request, stream: StreamHandle) -> Result<()> {
        let Counts::Uniform(count) = request.counts else {
            fail!(Unsupported, "{}: it has no calls with a count for each rank", self.library.name);
        };
        let (calls, comm) = (&self.library.functions, self.handle);
        let (input, output) = (request.input.cast::<c_void>(), request.output.cast::<c_void>());
        let (count, dtype, root) = (count as usize, dtype_number(request.dtype), request.root as c_int);
        let operator = || self.operator(request.operator);
        let stream: Stream = std::ptr::with_exposed_provenance_mut(stream.0);
        // SAFETY: the caller's promise, for each of the calls.
        let (call, result) = unsafe {
            match request.kind {
                Kind::Allreduce => (
                    "ncclAllReduce",
                    (calls.allreduce)(input, output, count, dtype, operator()?, comm, stream),
                ),
                Kind::Reduce => (
                    "ncclReduce",
                    (calls.reduce)(input, output, count, dtype, operator()?, root, comm, stream),
                ),
                Kind::Broadcast => {
                    ("ncclBroadcast", (calls.broadcast)(input, output, count, dtype, root, comm, stream))
                }
                Kind::Allgather => {
                    ("ncclAllGather", (calls.allgather)(input, output, count, dtype, comm, stream))
                }
                Kind::ReduceScatter => (
                    "ncclReduceScatter",
                    (calls.reduce_scatter)(input, output, count, dtype, operator()?, comm, stream),
                ),
                Kind::Alltoall if request.input == request.output.cast_const() => {
                    fail!(Unsupported, "{}: its all-to-all does not work in place", self.library.name)
                }
                Kind::Alltoall => match calls.alltoall {
                    Some(alltoall) => ("ncclAlltoAll", alltoall(input, output, count, dtype, comm, stream)),
                    None => return self.grouped(request, count, stream),
                },
                Kind::Gather | Kind::Scatter | Kind::Send => return self.grouped(request, count, stream),
                Kind::Barrier | Kind::Receive | Kind::ReceiveAny | Kind::SparseAllreduce => {
                    fail!(Unsupported, "{}: {} is not measured", self.library.name, request.kind.name())
                }
            }
        };
        self.library.check(call, result)
    }

    /// An operation made of sends and receives in a group.
    ///
    /// # Safety
    /// As [`Communicator::run`].
    unsafe fn grouped(&self, request: &Request, count: usize, stream: Stream) -> Result<()> {
        let calls = &self.library.functions;
        let (rank, size) = (self.rank, self.size);
        let block = count * request.dtype.size();
        let dtype = dtype_number(request.dtype);
        let here = rank == request.root;
        // Each a peer, and how far into the buffer its block is.
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let blocks = || (0..size).map(|peer| (peer, peer as usize * block));
        match request.kind {
            // Each sends to the next and receives from the one before.
            Kind::Send => {
                sends.push(((rank + 1) % size, 0));
                receives.push(((rank + size - 1) % size, 0));
            }
            Kind::Gather => {
                sends.push((request.root, 0));
                receives.extend(blocks().filter(|_| here));
            }
            Kind::Scatter => {
                sends.extend(blocks().filter(|_| here));
                receives.push((request.root, 0));
            }
            _ => {
                sends.extend(blocks());
                receives.extend(blocks());
            }
        }
        // SAFETY: the caller's promise; blocks lie within the buffers. The group is closed whatever becomes
        // of the calls.
        unsafe {
            self.library.check("ncclGroupStart", (calls.group_start)())?;
            let mut outcome = Ok(());
            for (peer, offset) in sends {
                let from = request.input.wrapping_add(offset).cast();
                let result = (calls.send)(from, count, dtype, peer as c_int, self.handle, stream);
                outcome = outcome.and(self.library.check("ncclSend", result));
            }
            for (peer, offset) in receives {
                let into = request.output.wrapping_add(offset).cast();
                let result = (calls.receive)(into, count, dtype, peer as c_int, self.handle, stream);
                outcome = outcome.and(self.library.check("ncclRecv", result));
            }
            outcome.and(self.library.check("ncclGroupEnd", (calls.group_end)()))
        }
    }

    fn operator(&self, operator: Operator) -> Result<c_int> {
        Ok(match operator {
            Operator::Sum => 0,
            Operator::Product => 1,
            Operator::Max => 2,
            Operator::Min => 3,
            Operator::Average => 4,
            other => {
                let name = Operator::name_of(other.number());
                fail!(Unsupported, "{}: the operator {name} is not measured by NCCL's ABI", self.library.name)
            }
        })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let calls = &self.library.functions;
        for (memory, window) in self.windows.drain(..) {
            let (Some(deregister), Some(free)) = (calls.deregister, calls.free) else { continue };
            if self.stuck {
                // Kernels may still use it: it goes with the process.
                continue;
            }
            // SAFETY: ours, and nobody uses it after this.
            unsafe {
                if !window.is_null() {
                    deregister(self.handle, window);
                }
                free(memory);
            }
        }
        let (call, end) =
            if self.stuck { ("ncclCommAbort", calls.abort) } else { ("ncclCommDestroy", calls.destroy) };
        // SAFETY: ours, and nobody uses it after this.
        if let Err(error) = self.library.check(call, unsafe { end(self.handle) }) {
            log::warn!("{error}");
        }
    }
}

fn dtype_number(dtype: DataType) -> c_int {
    match dtype {
        DataType::I8 => 0,
        DataType::U8 => 1,
        DataType::I32 => 2,
        DataType::U32 => 3,
        DataType::I64 => 4,
        DataType::U64 => 5,
        DataType::F16 => 6,
        DataType::F32 => 7,
        DataType::F64 => 8,
        DataType::Bf16 => 9,
        DataType::F8E4M3 => 10,
        DataType::F8E5M2 => 11,
    }
}

/// # Safety
/// `text` is NULL or a C string.
unsafe fn copied(text: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::process::Command;

    /// A library for one rank, over host memory: it checks that arguments arrive as NCCL's header orders
    /// them.
    const FAKE: &str = r#"
        #include <stddef.h>
        #include <string.h>
        typedef struct { char internal[128]; } id_t_;
        static int depth, sent;
        static const void *outgoing;
        static const char *last = "";
        const char *ncclGetLastError(void *comm) { return last; }
        int ncclGetVersion(int *v) { *v = 22809; return 0; }
        int ncclGetUniqueId(id_t_ *id) { memset(id->internal, 7, 128); return 0; }
        int ncclCommInitRank(void **comm, int n, id_t_ id, int rank) {
            for (int i = 0; i < 128; i++) if (id.internal[i] != 7) { last = "a strange id"; return 4; }
            if (n != 1 || rank != 0) { last = "one rank only"; return 4; }
            *comm = &depth;
            return 0;
        }
        int ncclCommDestroy(void *comm) { return comm != &depth; }
        int ncclCommAbort(void *comm) { return comm != &depth; }
        int ncclAllReduce(const void *in, void *out, size_t n, int type, int op, void *comm, void *stream) {
            if (type != 7 || op != 4 || stream != (void *)64) { last = "a strange reduction"; return 4; }
            memcpy(out, in, 4 * n);
            return 0;
        }
        int ncclReduce(const void *i, void *o, size_t n, int t, int op, int root, void *c, void *s) { return 5; }
        int ncclBroadcast(const void *i, void *o, size_t n, int t, int root, void *c, void *s) { return 5; }
        int ncclAllGather(const void *i, void *o, size_t n, int t, void *c, void *s) { return 5; }
        int ncclReduceScatter(const void *i, void *o, size_t n, int t, int op, void *c, void *s) { return 5; }
        int ncclSend(const void *in, size_t n, int type, int peer, void *comm, void *stream) {
            if (depth != 1) { last = "no group"; return 5; }
            outgoing = in; sent++;
            return 0;
        }
        int ncclRecv(void *out, size_t n, int type, int peer, void *comm, void *stream) {
            if (depth != 1 || sent != 1) { last = "no group"; return 5; }
            memcpy(out, outgoing, 4 * n);
            return 0;
        }
        int ncclGroupStart(void) { depth++; sent = 0; return 0; }
        int ncclGroupEnd(void) { depth--; return 0; }
    "#;

    struct Built(PathBuf);

    impl Built {
        fn new(name: &str, source: &str) -> Built {
            let folder = std::env::temp_dir().join(format!("unisono-fake-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("fake.c"), source).unwrap();
            let built = Command::new("cc")
                .args(["-shared", "-fPIC", "-o"])
                .arg(folder.join("fake.so"))
                .arg(folder.join("fake.c"))
                .arg(format!("-Wl,-soname,{}", Built::soname(name)))
                .status();
            assert!(built.unwrap().success());
            Built(folder)
        }

        /// What the loader knows it by, beside its path.
        fn soname(name: &str) -> String {
            format!("libunisono-fake-{name}.so.2")
        }

        fn open(&self) -> Result<Arc<Library>> {
            self.open_as(&self.0.join("fake.so"))
        }

        fn open_as(&self, path: &Path) -> Result<Arc<Library>> {
            // SAFETY: the functions above have NCCL's types.
            unsafe { Library::open("fake", path) }
        }
    }

    impl Drop for Built {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn request(kind: Kind, input: &[f32], output: &mut [f32]) -> Request {
        Request {
            kind,
            input: input.as_ptr().cast(),
            output: output.as_mut_ptr().cast(),
            counts: Counts::Uniform(input.len() as u64),
            dtype: DataType::F32,
            operator: Operator::Average,
            root: 0,
        }
    }

    #[test]
    fn a_library_gets_its_arguments_in_order() {
        let built = Built::new("whole", FAKE);
        let library = built.open().unwrap();
        assert_eq!(library.version().unwrap(), "2.28.9");
        let id = library.unique_id().unwrap();
        assert_eq!(id, UniqueId([7; 128]));
        let mut comm = Communicator::new(&library, id, 0, 1).unwrap();
        comm.settle();
        let input = [1.0, 2.0, 3.0];
        for kind in [Kind::Allreduce, Kind::Alltoall, Kind::Send, Kind::Gather, Kind::Scatter] {
            let mut output = [0.0; 3];
            // SAFETY: the library works on host memory, here and now.
            unsafe { comm.run(&request(kind, &input, &mut output), StreamHandle(64)) }.unwrap();
            assert_eq!(output, input, "{}", kind.name());
        }
    }

    #[test]
    fn a_refusal_is_told_with_the_librarys_own_words() {
        let built = Built::new("refusal", FAKE);
        let library = built.open().unwrap();
        let told = Communicator::new(&library, UniqueId([7; 128]), 1, 2).err().unwrap().to_string();
        assert!(told.contains("fake: ncclCommInitRank answered 4: one rank only"), "{told}");
        let comm = Communicator::new(&library, UniqueId([7; 128]), 0, 1).unwrap();
        let mut output = [0.0];
        // SAFETY: as above.
        let told = unsafe { comm.run(&request(Kind::Allreduce, &[1.0], &mut output), StreamHandle::NULL) };
        assert!(told.unwrap_err().text().contains("a strange reduction"));
    }

    #[test]
    fn a_library_is_not_compared_with_itself() {
        let (built, other) = (Built::new("itself", FAKE), Built::new("other", FAKE));
        let library = built.open().unwrap();
        built.open().unwrap().check_apart(&library).expect("one path twice is meant so");
        other.open().unwrap().check_apart(&library).expect("it is another file");
        let link = built.0.join("link.so");
        std::os::unix::fs::symlink(built.0.join("fake.so"), &link).unwrap();
        for path in [link, Built::soname("itself").into()] {
            let told = built.open_as(&path).unwrap().check_apart(&library).unwrap_err();
            let (given, opened) = (path.display(), built.0.join("fake.so"));
            let expected =
                format!("--library {given}: it is the library that was opened as {}", opened.display());
            assert!(told.text().contains(&expected) && told.text().contains("whole path"), "{told}");
        }
    }

    #[test]
    fn what_is_no_such_library_is_refused() {
        let built = Built::new("part", "int ncclGetVersion(int *v) { return 0; }");
        let told = built.open().err().unwrap().to_string();
        assert!(told.contains("fake.so: it has no ncclGetUniqueId"), "{told}");
        // SAFETY: there is none.
        let told = unsafe { Library::open("none", Path::new("/nowhere/libnccl.so.2")) }.err().unwrap();
        assert!(told.text().contains("--library /nowhere/libnccl.so.2: it cannot be opened"), "{told}");
    }
}
