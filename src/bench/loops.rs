//! `reduce-loops`: how fast this processor combines, in its caches and out of memory, by one thread.

use std::time::{Duration, Instant};

use serde_json::json;

use super::measure::{Sample, bandwidth};
use super::options::Options;
use super::output::say;
use super::{report, values};
use crate::error::Result;
use crate::reduce::{DataType, Operand, Operator, Reducer, Representation};

/// Bytes of an operand unless told: in the second-level cache, and out of memory.
const SIZES: [u64; 2] = [64 << 10, 64 << 20];
/// Operands of a fold: a kernel for each.
const OPERANDS: [usize; 2] = [2, 4];

/// Measures every type and operator of the options.
pub(super) fn measure(options: &Options) -> Result<bool> {
    let sizes = options.listed_sizes().unwrap_or(&SIZES);
    say!("# reductions by one thread; GB/s of output");
    say!(
        "{:<10} {:<9} {:>9} {:>11} {:>10} {:>10} {:>8}",
        "type",
        "operator",
        "operands",
        "size",
        "p50",
        "min",
        "GB/s"
    );
    let mut results = Vec::new();
    for &dtype in &options.types {
        for &operator in &options.operators {
            for count in OPERANDS {
                let Ok(reducer) = Reducer::new(dtype, operator, count as u32) else { continue };
                for &bytes in sizes {
                    let sample = time(&reducer, dtype, count, bytes as usize, options.budget);
                    let speed = bandwidth(bytes, sample.p50);
                    let name = Operator::name_of(operator.number());
                    say!(
                        "{:<10} {name:<9} {count:>9} {bytes:>11} {:>10.2} {:>10.2} {speed:>8.1}",
                        dtype.name(),
                        sample.p50,
                        sample.min
                    );
                    results.push(json!({
                        "type": dtype.name(),
                        "operator": name,
                        "operands": count,
                        "bytes": bytes,
                        "p50_us": sample.p50,
                        "p99_us": sample.p99,
                        "min_us": sample.min,
                        "gb_s": speed,
                    }));
                }
            }
        }
    }
    report::write(options, &json!({ "task": "reduce-loops", "results": results }))?;
    Ok(true)
}

/// Times folds of `operands` operands of `bytes` bytes into another buffer. They are ones: what they make of
/// each other is never so small or so large that a processor takes longer for it.
fn time(reducer: &Reducer, dtype: DataType, operands: usize, bytes: usize, budget: Duration) -> Sample {
    let count = bytes / dtype.size();
    let mut one = vec![0; dtype.size()];
    values::encode(dtype, 1, &mut one);
    let inputs = vec![one.repeat(count); operands];
    let mut out = vec![0; bytes];
    let folded: Vec<Operand> = inputs
        .iter()
        .map(|input| Operand { address: input.as_ptr(), representation: Representation::Element, scale: 1.0 })
        .collect();
    let mut run = || {
        // SAFETY: every operand and the output have so many elements, and nobody else uses them.
        unsafe { reducer.fold(&folded, out.as_mut_ptr(), Representation::Element, count) };
    };
    run();
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < 5 || (start.elapsed() < budget && times.len() < 20_000) {
        let one = Instant::now();
        run();
        times.push(one.elapsed().as_nanos() as u64);
    }
    std::hint::black_box(&out);
    Sample::of(times, 1)
}
