//! Lists of calls in which one thread has several ranks of a group.
//!
//! The kernels of one rank wait for those of the others. The driver has room for a few hundred things that a
//! stream has not done, and a thread that gives it one more waits inside the driver ([`super::ahead`]): one
//! that gave a rank all that it has to do would wait there for that rank's kernels, and these for what it
//! gives the next rank. So the ranks take turns: each begins one collective, then each its next. What is
//! composed of many launches is given to the streams chunk by chunk, in turns, too.

use super::batch::Pending;
use super::context::{Context, Membership};
use super::hosts::Composed;
use crate::engine::device::Way;
use crate::error::{Error, Result};

/// A rank whose device exchanges with those of others.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Seat {
    group: u64,
    device: u32,
}

impl Seat {
    fn of(context: &Context) -> Option<Seat> {
        let Membership::Group(group) = context.membership() else { return None };
        let device = group.devices().and_then(Way::exchange)?.device();
        Some(Seat { group: group.id(), device })
    }
}

/// One turn of each rank of a group.
#[derive(Default)]
struct Round {
    /// None yet: nobody has had a turn.
    group: Option<u64>,
    /// The devices whose rank has had its turn, or of which a call is left for later; `None`: of whichever
    /// devices that is.
    closed: Vec<Option<u32>>,
}

impl Round {
    /// Whether a call begins now: only other ranks of the group overtake what stands before them, and what is
    /// on one device keeps its order.
    fn takes(&self, seat: Option<Seat>) -> bool {
        let Some(group) = self.group else { return true };
        let is_open = |device| self.closed.iter().all(|closed| closed.is_some_and(|closed| closed != device));
        seat.is_some_and(|seat| seat.group == group && is_open(seat.device))
    }

    fn close(&mut self, seat: Option<Seat>) {
        let device = seat.map(|seat| seat.device);
        if !self.closed.contains(&device) {
            self.closed.push(device);
        }
    }
}

/// Begins the calls of a list that are closed together: `begin` begins the one at a place, by
/// [`Context::begin_launch_together`], and `contexts` says whose they are. They begin in their order, but
/// that ranks of one group take turns. A result for each. If it `stops`, what stands behind a call that
/// cannot be begun, and has not begun, does not begin, and has that call's error.
pub fn begin_in_turns(
    contexts: &[Option<&Context>],
    stops: bool,
    begin: &mut dyn FnMut(usize) -> Result<Option<Pending>>,
) -> Vec<Result<Option<Pending>>> {
    let seats: Vec<Option<Seat>> = contexts.iter().map(|context| context.and_then(Seat::of)).collect();
    in_turns(&seats, stops, begin)
}

/// As [`begin_in_turns`], of calls of such ranks; `None`: of others.
fn in_turns(
    seats: &[Option<Seat>],
    stops: bool,
    begin: &mut dyn FnMut(usize) -> Result<Option<Pending>>,
) -> Vec<Result<Option<Pending>>> {
    let mut ranks: Vec<Seat> = Vec::new();
    for seat in seats.iter().flatten() {
        if !ranks.contains(seat) {
            ranks.push(*seat);
        }
    }
    let has_several = |seat: &Seat| ranks.iter().any(|rank| rank.group == seat.group && rank != seat);
    let mut results: Vec<Option<Result<Option<Pending>>>> = Vec::new();
    results.resize_with(seats.len(), || None);
    let mut failed: Option<(usize, Error)> = None;
    let mut left: Vec<usize> = (0..seats.len()).collect();
    while !left.is_empty() {
        let (mut round, mut composed) = (Round::default(), Vec::new());
        left.retain(|&place| {
            if !round.takes(seats[place]) {
                round.close(seats[place]);
                return true;
            }
            if stops && failed.as_ref().is_some_and(|(before, _)| *before < place) {
                return false;
            }
            let mut begun = begin(place);
            match (&begun, seats[place].filter(has_several)) {
                (Ok(Some(pending)), Some(_)) if pending.is_point() => {}
                (Ok(pending), Some(seat)) => {
                    round.group = Some(seat.group);
                    round.close(Some(seat));
                    if pending.as_ref().is_some_and(|pending| pending.as_composed().is_some()) {
                        composed.push(place);
                    }
                }
                _ => begun = begun.and_then(|pending| pending.map(Pending::given).transpose()),
            }
            note(&mut failed, place, &begun);
            results[place] = Some(begun);
            false
        });
        let call = |&place: &usize| match &results[place] {
            Some(Ok(Some(pending))) => pending.as_composed(),
            _ => None,
        };
        let calls: Vec<(&Composed, bool)> = composed.iter().filter_map(call).collect();
        // SAFETY: who began them has promised that their memory and streams last until they have ended.
        let works = unsafe { Composed::start_in_turns(&calls) };
        for (place, work) in composed.into_iter().zip(works) {
            let begun = work.map(|work| Some(Pending::from(work)));
            note(&mut failed, place, &begun);
            results[place] = Some(begun);
        }
    }
    let never = |result: Option<_>| match (result, &failed) {
        (Some(result), _) => result,
        (None, Some((_, error))) => Err(error.clone()),
        (None, None) => Ok(None),
    };
    results.into_iter().map(never).collect()
}

/// Notes the first of a list that cannot be begun.
fn note<T>(failed: &mut Option<(usize, Error)>, place: usize, begun: &Result<T>) {
    if let Err(error) = begun
        && failed.as_ref().is_none_or(|(first, _)| place < *first)
    {
        *failed = Some((place, error.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    const fn seat(group: u64, device: u32) -> Option<Seat> {
        Some(Seat { group, device })
    }

    /// In which order calls begin of which each is a turn.
    fn order(seats: &[Option<Seat>]) -> Vec<usize> {
        let mut order = Vec::new();
        let mut begin = |place| {
            order.push(place);
            Ok(None)
        };
        in_turns(seats, false, &mut begin).into_iter().for_each(|begun| drop(begun.expect("it begins")));
        order
    }

    #[test]
    fn ranks_of_a_group_take_turns_and_what_is_on_one_device_keeps_its_order() {
        let [first, other, alone] = [seat(7, 0), seat(7, 1), seat(9, 0)];
        assert_eq!(order(&[first, first, other, other]), [0, 2, 1, 3]);
        assert_eq!(order(&[first, first, first, other]), [0, 3, 1, 2]);
        assert_eq!(
            order(&[first, alone, first, other, other]),
            [0, 3, 1, 2, 4],
            "another group's comes between"
        );
        assert_eq!(order(&[first, alone, seat(9, 1), other]), [0, 1, 2, 3], "and on both devices");
        assert_eq!(order(&[first, None, other]), [0, 1, 2], "on whichever device that is");
        assert_eq!(
            order(&[alone, alone, None, None]),
            [0, 1, 2, 3],
            "nobody waits for another rank of its thread"
        );
    }

    #[test]
    fn what_stands_behind_a_call_that_cannot_be_begun_has_its_error_or_begins() {
        let seats = [seat(7, 0), seat(7, 0), seat(7, 1), seat(7, 1), None];
        for (stops, at) in [(true, 2), (true, 1), (false, 2)] {
            let mut begin = |place| match place == at {
                true => Err(Error::new(Status::InvalidArgument, "no such call")),
                false => Ok(None),
            };
            let failed: Vec<bool> =
                in_turns(&seats, stops, &mut begin).into_iter().map(|begun| begun.is_err()).collect();
            // Place 2 begins before place 1.
            let due = match (stops, at) {
                (true, 2) => [false, false, true, true, true],
                (true, _) => [false, true, false, true, true],
                _ => [false, false, true, false, false],
            };
            assert_eq!(failed, due, "{stops}, {at}");
        }
    }
}
