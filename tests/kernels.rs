//! The CUDA kernels without a GPU: their sources, compiled for the host, against `unisono::reduce`, bit for
//! bit; and the committed code against what the sources compile to. `scripts/gpu/kernels_check.py` runs the
//! code itself on a GPU.

#[path = "support/not_run.rs"]
mod not_run;

use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use not_run::not_run;
use unisono::cuda::kernels::{Launch, MAX_OPERANDS, kernel};
use unisono::reduce::{DataType, Operand, Operator, Reducer, Representation};

/// A kernel compiled for the host: the launch, blocks, threads of a block.
type HostKernel = unsafe extern "C" fn(*const c_void, u32, u32);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn host_kernel(name: &CStr) -> HostKernel {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let library = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("unisono_kernels.so");
        let compiler = std::env::var_os("CXX").unwrap_or_else(|| "g++".into());
        let status = Command::new(compiler)
            .args([
                "-std=c++17",
                "-O1",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
                "-shared",
                "-fPIC",
                "-o",
            ])
            .arg(&library)
            .arg(root().join("kernels/host.cpp"))
            .status()
            .expect("a C++ compiler");
        assert!(status.success(), "kernels/host.cpp compiles");
        let path = CString::new(library.into_os_string().into_encoded_bytes()).expect("a path has no 0 byte");
        // SAFETY: a library without initialisers, which stays loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{path:?} loads");
        handle.addr()
    });
    // SAFETY: a handle from `dlopen` and a C string.
    let address = unsafe { libc::dlsym(std::ptr::with_exposed_provenance_mut(*library), name.as_ptr()) };
    assert!(!address.is_null(), "{name:?} is one of kernels/fold.cuh");
    // SAFETY: every function of kernels/host.cpp has this type.
    unsafe { std::mem::transmute::<*mut c_void, HostKernel>(address) }
}

/// A stream of bits that is the same in every run (xorshift64*).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// Elements of any bits, small integers, and for floats zeros, infinities, NaNs, the smallest and the
/// largest.
fn elements(dtype: DataType, count: usize, noise: &mut Noise) -> Vec<u8> {
    let corners: &[u64] = match dtype {
        DataType::F16 => &[0, 0x8000, 0x7c00, 0xfc00, 0x7e01, 0xfe00, 1, 0x7bff, 0x3c00, 0xbc00],
        DataType::Bf16 => &[0, 0x8000, 0x7f80, 0xff80, 0x7fc1, 0xffc0, 1, 0x7f7f, 0x3f80, 0xbf80],
        DataType::F8E4M3 => &[0, 0x80, 0x7e, 0xfe, 0x7f, 0xff, 1, 0x38, 0xb8],
        DataType::F8E5M2 => &[0, 0x80, 0x7c, 0xfc, 0x7d, 0xff, 1, 0x7b, 0x3c, 0xbc],
        DataType::F32 => {
            &[0, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_0001, 1, 0x7f7f_ffff, 0x3f80_0000]
        }
        DataType::F64 => {
            &[0, 1 << 63, 0x7ff0 << 48, 0xfff0 << 48, 0xfff8 << 48 | 1, 1, 0x3ff0 << 48, 0xbff0 << 48]
        }
        _ => &[0, 1, u64::MAX, 1 << 63, 1 << 31, 1 << 7, 0x7f, 0x7fff_ffff, u64::MAX >> 1],
    };
    let element = |_| {
        let bits = noise.next();
        let small = (bits >> 40) as i16;
        let moderate = match (bits % 4, dtype) {
            (0, _) => corners[(bits >> 8) as usize % corners.len()],
            (1, DataType::F32) => (f32::from(small) / 64.0).to_bits().into(),
            (1, DataType::F64) => (f64::from(small) / 64.0).to_bits(),
            (1, DataType::F16 | DataType::Bf16) => u64::from(small as u16 & 0x80ff) | 0x3c00,
            (1, _) => i64::from(small) as u64,
            _ => noise.next(),
        };
        moderate.to_le_bytes().into_iter().take(dtype.size())
    };
    (0..count).flat_map(element).collect()
}

fn operators(dtype: DataType) -> Vec<Operator> {
    let mut all = vec![
        Operator::Sum,
        Operator::Product,
        Operator::Min,
        Operator::Max,
        Operator::Average,
        Operator::PreMulSum(1.0),
    ];
    if !dtype.is_float() {
        all.extend([Operator::BitAnd, Operator::BitOr, Operator::BitXor]);
    }
    all
}

/// One operand as it lies in memory: from `offset` of a 64-byte boundary.
struct Buffer {
    storage: Vec<u128>,
    offset: usize,
    representation: Representation,
    scale: f64,
}

impl Buffer {
    fn new(bytes: &[u8], offset: usize, representation: Representation, scale: f64) -> Buffer {
        let mut buffer = Buffer { storage: vec![0; bytes.len() / 16 + 12], offset, representation, scale };
        let start = buffer.start();
        // SAFETY: `storage` has room for the bytes, the offset and the way to the boundary.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        buffer
    }

    fn start(&mut self) -> *mut u8 {
        let storage = self.storage.as_mut_ptr().cast::<u8>();
        storage.wrapping_add(storage.align_offset(64) + self.offset)
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        // SAFETY: at most as many bytes as the buffer was made of.
        unsafe { std::slice::from_raw_parts(self.start(), count) }.to_vec()
    }

    fn operand(&mut self) -> Operand {
        Operand { address: self.start(), representation: self.representation, scale: self.scale }
    }
}

/// What positions of a representation hold.
fn held(dtype: DataType, representation: Representation) -> DataType {
    match representation {
        Representation::Element => dtype,
        Representation::Accumulator => dtype.accumulator(),
    }
}

fn reduce(
    dtype: DataType,
    operator: Operator,
    ranks: u32,
    operands: &[Operand],
    representation: Representation,
    count: usize,
) -> Vec<u8> {
    let reducer = Reducer::new(dtype, operator, ranks).expect("a type and an operator that go together");
    let mut out = vec![0; count * held(dtype, representation).size()];
    // SAFETY: `out` and the operands have `count` positions.
    unsafe { reducer.fold(operands, out.as_mut_ptr(), representation, count) };
    out
}

/// In accumulators, the bits of a NaN are unspecified.
fn comparable(dtype: DataType, representation: Representation, bytes: &[u8]) -> Vec<u8> {
    match (representation, dtype.accumulator()) {
        (Representation::Accumulator, DataType::F32) => bytes
            .chunks(4)
            .map(|bits| f32::from_le_bytes(bits.try_into().expect("4 bytes")))
            .flat_map(|value| if value.is_nan() { f32::NAN } else { value }.to_le_bytes())
            .collect(),
        (Representation::Accumulator, DataType::F64) => bytes
            .chunks(8)
            .map(|bits| f64::from_le_bytes(bits.try_into().expect("8 bytes")))
            .flat_map(|value| if value.is_nan() { f64::NAN } else { value }.to_le_bytes())
            .collect(),
        _ => bytes.to_vec(),
    }
}

/// How operands lie: all alike, each with an alignment of its own, or at any address.
const OFFSETS: [fn(usize, usize) -> usize; 4] =
    [|_, _| 0, |_, size| size, |i, size| i % 3 * size, |i, _| [1, 3, 0][i % 3]];

/// Every operator of a type: counts of operands, counts, alignments, grids, representations, in place or not.
fn check_type(dtype: DataType) {
    let mut noise = Noise(0x9e37_79b9 + dtype as u64);
    for operator in operators(dtype) {
        let name = kernel(dtype, &operator).expect("every type and operator has a kernel");
        let run = host_kernel(name);
        for (round, k) in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 28, MAX_OPERANDS].into_iter().enumerate() {
            for (layout, offset) in OFFSETS.into_iter().enumerate() {
                let count = [230, 71, 16, 1, 300][(round + layout) % 5];
                let ranks = [k as u32, 3, 200, 70_000, u32::MAX][noise.next() as usize % 5];
                // Elements alone, or accumulators among them.
                for mixed in [false, true] {
                    let mut buffers: Vec<Buffer> = (0..k)
                        .map(|i| {
                            let bytes = elements(dtype, count, &mut noise);
                            let scale = [1.0, -0.5, 3.25, 2.0, -1e12][i % 5];
                            let mut element = Buffer::new(&bytes, 0, Representation::Element, scale);
                            if !mixed || noise.next().is_multiple_of(2) {
                                return Buffer {
                                    ..Buffer::new(
                                        &bytes,
                                        offset(i, dtype.size()),
                                        Representation::Element,
                                        scale,
                                    )
                                };
                            }
                            let wide = Representation::Accumulator;
                            let bytes = reduce(dtype, operator, ranks, &[element.operand()], wide, count);
                            Buffer::new(&bytes, offset(i, dtype.accumulator().size()), wide, f64::NAN)
                        })
                        .collect();
                    let operands: Vec<Operand> = buffers.iter_mut().map(Buffer::operand).collect();
                    let representation = if mixed && layout % 2 == 0 {
                        Representation::Accumulator
                    } else {
                        Representation::Element
                    };
                    let wanted = reduce(dtype, operator, ranks, &operands, representation, count);
                    let size = held(dtype, representation).size();
                    let in_place = (noise.next().is_multiple_of(2))
                        .then(|| noise.next() as usize % k)
                        .filter(|&i| held(dtype, operands[i].representation).size() == size);
                    let mut fresh =
                        Buffer::new(&vec![0xa5; count * size + 1], offset(k, size), representation, 1.0);
                    let out = match in_place {
                        Some(i) => operands[i].address.cast_mut(),
                        None => fresh.start(),
                    };
                    let launch = Launch::new(dtype, &operator, ranks, &operands, out, representation, count);
                    let grid = launch.grid(dtype, 3);
                    let (blocks, threads) = if round % 2 == 0 { (grid.blocks, grid.threads) } else { (2, 7) };
                    // SAFETY: the operands and `out` have `count` positions.
                    unsafe { run((&raw const launch).cast(), blocks, threads) };
                    let got = match in_place {
                        Some(i) => buffers[i].bytes(count * size),
                        None => {
                            let mut got = fresh.bytes(count * size + 1);
                            assert_eq!(got.pop(), Some(0xa5), "{name:?} wrote past the end");
                            got
                        }
                    };
                    assert!(
                        comparable(dtype, representation, &got) == comparable(dtype, representation, &wanted),
                        "{name:?} {dtype:?} {operator:?} k={k} ranks={ranks} count={count} layout={layout} \
                         mixed={mixed} in_place={in_place:?}:\n{got:x?}\n{wanted:x?}"
                    );
                }
            }
        }
    }
}

/// Of elements that lie at multiples of their size.
#[test]
fn couriers_combine_the_same() {
    let mut noise = Noise(1234);
    let element = Representation::Element;
    for dtype in DataType::ALL {
        for operator in operators(dtype) {
            let name = kernel(dtype, &operator).expect("every type and operator has a kernel");
            let name = name.to_str().expect("letters").replace("unisono_fold", "unisono_combine");
            let run = host_kernel(&CString::new(name.clone()).expect("no zero"));
            for (k, layout) in (1..=8).flat_map(|k| (0..3).map(move |layout| (k, layout))) {
                let (count, offset) = ([230, 71, 16, 1, 300][(k + layout) % 5], OFFSETS[layout]);
                let ranks = [k as u32, 3, 70_000][noise.next() as usize % 3];
                let mut buffers: Vec<Buffer> = (0..k)
                    .map(|i| {
                        let bytes = elements(dtype, count, &mut noise);
                        Buffer::new(
                            &bytes,
                            offset(i, dtype.size()),
                            element,
                            [1.0, -0.5, 3.25, 2.0, -1e12][i % 5],
                        )
                    })
                    .collect();
                let operands: Vec<Operand> = buffers.iter_mut().map(Buffer::operand).collect();
                let wanted = reduce(dtype, operator, ranks, &operands, element, count);
                let mut fresh =
                    Buffer::new(&vec![0xa5; wanted.len() + 1], offset(k, dtype.size()), element, 1.0);
                let in_place = noise.next().is_multiple_of(2).then(|| noise.next() as usize % k);
                let out = in_place.map_or(fresh.start(), |i| operands[i].address.cast_mut());
                let launch = Launch::new(dtype, &operator, ranks, &operands, out, element, count);
                let (blocks, threads) = if layout == 1 { (3, 32) } else { (2, 7) };
                // SAFETY: the operands and `out` have `count` positions.
                unsafe { run((&raw const launch).cast(), blocks, threads) };
                let got = match in_place {
                    Some(i) => buffers[i].bytes(wanted.len()),
                    None => {
                        let mut got = fresh.bytes(wanted.len() + 1);
                        assert_eq!(got.pop(), Some(0xa5), "{name:?} wrote past the end");
                        got
                    }
                };
                assert!(
                    got == wanted,
                    "{name:?} {operator:?} k={k} ranks={ranks} count={count} layout={layout} in_place={in_place:?}:\n\
                     {got:x?}\n{wanted:x?}"
                );
            }
        }
    }
}

#[test]
fn a_sum_stands_for_its_subtree() {
    let mut noise = Noise(77);
    for dtype in [DataType::F32, DataType::Bf16, DataType::F8E4M3, DataType::U8, DataType::I64] {
        let run = host_kernel(kernel(dtype, &Operator::Sum).expect("a sum"));
        for (round, k) in [2, 3, 5, 8, 9, 16, 21, MAX_OPERANDS, MAX_OPERANDS].into_iter().enumerate() {
            let (count, offset) = ([230, 71, 16][round % 3], OFFSETS[round % 4]);
            let (element, wide) = (Representation::Element, Representation::Accumulator);
            let mut leaves: Vec<Buffer> =
                (0..k).map(|_| Buffer::new(&elements(dtype, count, &mut noise), 0, element, 1.0)).collect();
            let leaves: Vec<Operand> = leaves.iter_mut().map(Buffer::operand).collect();
            let wanted = reduce(dtype, Operator::Sum, 1, &leaves, element, count);
            // Aligned subtrees, as large as chance has it.
            let (mut sums, mut absent, mut place) = (Vec::new(), 0u32, 0);
            while place < k {
                let widest = if place == 0 { k } else { 1 << place.trailing_zeros() };
                let places = (1usize << (noise.next() % 6)).min(widest).min(k - place);
                let bytes = reduce(dtype, Operator::Sum, 1, &leaves[place..place + places], wide, count);
                sums.push((
                    places,
                    Buffer::new(&bytes, offset(place, dtype.accumulator().size()), wide, 1.0),
                ));
                for covered in place + 1..place + places {
                    absent |= 1 << covered;
                }
                place += places;
            }
            let operands: Vec<Operand> = sums
                .iter_mut()
                .flat_map(|(places, sum)| {
                    let operand = sum.operand();
                    (0..*places).map(move |_| operand)
                })
                .collect();
            let mut out = Buffer::new(&vec![0; wanted.len()], 0, element, 1.0);
            let launch = Launch::new(dtype, &Operator::Sum, 1, &operands, out.start(), element, count);
            let launch = launch.without(absent);
            // SAFETY: the operands and `out` have `count` positions.
            unsafe { run((&raw const launch).cast(), 2, 7) };
            assert!(out.bytes(wanted.len()) == wanted, "{dtype:?} of {k}, absent {absent:#x}");
        }
    }
}

macro_rules! check_types {
    ($($name:ident: $dtype:ident),*) => {
        $(
            #[test]
            fn $name() {
                check_type(DataType::$dtype);
            }
        )*
    };
}
check_types!(
    folds_i8: I8, folds_u8: U8, folds_i32: I32, folds_u32: U32, folds_i64: I64, folds_u64: U64,
    folds_f16: F16, folds_f32: F32, folds_f64: F64, folds_bf16: Bf16, folds_f8e4m3: F8E4M3, folds_f8e5m2: F8E5M2
);

/// Folds one operand by both, and compares.
fn check_conversion(dtype: DataType, bytes: &[u8], from: Representation, to: Representation) {
    let count = bytes.len() / held(dtype, from).size();
    let mut buffer = Buffer::new(bytes, 0, from, 1.0);
    let operand = [buffer.operand()];
    let wanted = reduce(dtype, Operator::Sum, 1, &operand, to, count);
    let mut out = Buffer::new(&vec![0; wanted.len()], 0, to, 1.0);
    let launch = Launch::new(dtype, &Operator::Sum, 1, &operand, out.start(), to, count);
    let run = host_kernel(kernel(dtype, &Operator::Sum).expect("a sum"));
    // SAFETY: the operand and `out` have `count` positions.
    unsafe { run((&raw const launch).cast(), 1, 32) };
    let got = out.bytes(wanted.len());
    let size = held(dtype, to).size();
    let differs = comparable(dtype, to, &got)
        .chunks(size)
        .zip(comparable(dtype, to, &wanted).chunks(size))
        .position(|(got, wanted)| got != wanted);
    assert_eq!(differs, None, "{dtype:?} {from:?} to {to:?}");
}

#[test]
fn short_floats_convert_as_on_the_host() {
    for dtype in [DataType::F16, DataType::Bf16, DataType::F8E4M3, DataType::F8E5M2] {
        let all: Vec<u8> = match dtype.size() {
            1 => (0..=u8::MAX).collect(),
            _ => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
        };
        check_conversion(dtype, &all, Representation::Element, Representation::Accumulator);
        check_conversion(dtype, &all, Representation::Element, Representation::Element);
        // Every upper half of an f32, with a lower half on, next to and between the ties of every format.
        let accumulators: Vec<u8> = (0..=u16::MAX)
            .flat_map(|upper| {
                [0u16, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff].map(|lower| (upper, lower))
            })
            .flat_map(|(upper, lower)| (u32::from(upper) << 16 | u32::from(lower)).to_le_bytes())
            .collect();
        check_conversion(dtype, &accumulators, Representation::Accumulator, Representation::Element);
    }
}

#[test]
fn bitwise_kernels_are_for_integers() {
    assert_eq!(kernel(DataType::F32, &Operator::BitXor), None);
    assert!(kernel(DataType::I64, &Operator::BitXor).is_some());
}

/// Without Python or the compiler, which it installs from PyPI, this says so, and compares nothing.
#[test]
fn the_committed_code_is_what_the_sources_compile_to() {
    let output = match Command::new("python3").arg(root().join("scripts/kernels")).arg("--check").output() {
        Ok(output) => output,
        Err(error) => return not_run("scripts/kernels", format_args!("python3: {error}")),
    };
    let text = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => {}
        Some(2) => not_run("scripts/kernels", text.trim_end()),
        _ => panic!("scripts/kernels --check: {text}"),
    }
}
