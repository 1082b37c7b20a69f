//! Where ways of doing a thing cross: up to which size each of them is to be used, by their times.
#![forbid(unsafe_code)]

/// How many ways there are; those of a later one begin where those of the one before end.
pub(super) const WAYS: usize = 4;

/// The times of every way at one size; infinite where it was not measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) bytes: u64,
    pub(super) times: [f64; WAYS],
}

/// Up to how many bytes each way but the last is used, so that the product of all times is the least; 0:
/// never. Between two sizes that were measured a bound lies half way. `points` by rising sizes, every one
/// with some finite time, the last one of the last way.
pub(super) fn bounds(points: &[Point]) -> [u64; WAYS - 1] {
    // The best sum of logarithms with the first points done and no later way than this one used; and how many
    // points each way has had.
    let mut best = [(0.0, [0; WAYS]); WAYS];
    for point in points {
        let mut next = [(f64::INFINITY, [0; WAYS]); WAYS];
        for way in 0..WAYS {
            // Whoever comes first wins a tie: simpler ways do.
            for (sum, counts) in &best[..=way] {
                let total = sum + point.times[way].ln();
                if total < next[way].0 {
                    next[way] = (total, *counts);
                    next[way].1[way] += 1;
                }
            }
        }
        best = next;
    }
    let mut chosen = best[0];
    for candidate in best {
        if candidate.0 < chosen.0 {
            chosen = candidate;
        }
    }
    let mut done = 0;
    std::array::from_fn(|way| {
        let count = chosen.1[way];
        done += count;
        match (count, done) {
            (0, _) => 0,
            (_, done) => match points.get(done) {
                Some(next) => points[done - 1].bytes.midpoint(next.bytes),
                None => points[done - 1].bytes,
            },
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(times: &[[f64; WAYS]]) -> Vec<Point> {
        (3..).zip(times).map(|(log, &times)| Point { bytes: 1 << log, times }).collect()
    }

    const NO: f64 = f64::INFINITY;

    #[test]
    fn each_way_is_used_where_it_is_the_fastest() {
        let measured = points(&[
            [3.0, 4.0, NO, NO],
            [3.1, 4.0, 5.0, NO],
            [5.0, 4.1, 5.0, 9.0],
            [NO, 6.0, 5.1, 9.0],
            [NO, NO, 8.0, 7.9],
        ]);
        assert_eq!(bounds(&measured), [24, 48, 96]);
    }

    #[test]
    fn one_odd_time_moves_no_bound() {
        let measured =
            points(&[[3.0, 4.0, NO, NO], [3.0, 2.9, NO, NO], [3.0, 4.0, NO, NO], [6.0, 4.0, NO, NO]]);
        assert_eq!(bounds(&measured)[0], 48);
    }

    #[test]
    fn a_way_that_is_never_the_fastest_is_left_out() {
        let measured = points(&[[3.0, 4.0, 4.0, NO], [5.0, 6.0, 4.0, NO], [9.0, 9.0, 9.0, 5.0]]);
        assert_eq!(bounds(&measured), [12, 0, 24]);
        let only = points(&[[NO, NO, NO, 1.0], [NO, NO, NO, 1.0]]);
        assert_eq!(bounds(&only), [0, 0, 0]);
        let first = points(&[[1.0, 2.0, NO, NO]]);
        assert_eq!(bounds(&first), [8, 0, 0]);
    }
}
