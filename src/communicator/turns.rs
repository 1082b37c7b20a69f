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

/// What a call keeps its order with: calls of its context, and what is on its device, if it is on one.
#[derive(Clone, Copy)]
struct Place {
    context: usize,
    device: Option<u32>,
    /// Set if other ranks of its group are in the list: these take turns.
    seat: Option<Seat>,
}

/// One turn of each rank of a group.
#[derive(Default)]
struct Round {
    /// None yet: nobody has had a turn.
    group: Option<u64>,
    /// The devices whose rank has had its turn, or of which a call is left for later,
    devices: Vec<u32>,
    /// and the contexts of which one is.
    contexts: Vec<usize>,
}

impl Round {
    /// Whether a call begins now. It overtakes nothing that it keeps its order with; and what takes no turns
    /// and is on a device overtakes what has had its turn, which may not have been given yet, only if a rank
    /// of this group `comes_behind` it there.
    fn takes(&self, place: &Place, comes_behind: impl FnOnce(Seat) -> bool) -> bool {
        let Some(group) = self.group else { return true };
        if self.contexts.contains(&place.context) {
            return false;
        }
        // On host memory nothing keeps the thread waiting.
        let Some(device) = place.device else { return true };
        !self.devices.contains(&device)
            && place.seat.map_or_else(|| comes_behind(Seat { group, device }), |seat| seat.group == group)
    }

    /// A call is left for later.
    fn leave(&mut self, place: &Place) {
        if !self.contexts.contains(&place.context) {
            self.contexts.push(place.context);
        }
        if let Some(device) = place.device.filter(|device| !self.devices.contains(device)) {
            self.devices.push(device);
        }
    }
}

/// Begins the calls of a list that are closed together: `begin` begins the one at a place, by
/// [`Context::begin_launch_together`], and `contexts` says whose they are. They begin in their order, but
/// that ranks of one group take turns: they overtake what is neither of their context nor on their device.
/// Asks `device_of` on which device a call is that no exchange has, if on any. A result for each.
/// What stands behind a call that cannot be begun, and has not begun, does not begin, and has that call's
/// error, if it is of the same context, whose other ranks would take it for that call, or if the list `stops`.
/// Of a group of which several ranks are in the list no call begins if `check` refuses one: those of the
/// others would wait for it. That is [`Context::check_memory`], of the call at a place.
pub fn begin_in_turns(
    contexts: &[Option<&Context>],
    device_of: &dyn Fn(usize) -> Option<u32>,
    stops: bool,
    check: &dyn Fn(usize) -> Result<()>,
    begin: &mut dyn FnMut(usize) -> Result<Option<Pending>>,
) -> Vec<Result<Option<Pending>>> {
    let refused = refused(contexts, check);
    let mut begin = |place: usize| {
        let group = contexts[place].map(Context::id);
        match refused.iter().find(|(refused, _)| Some(*refused) == group) {
            Some((_, error)) => Err(error.clone()),
            None => begin(place),
        }
    };
    let seats: Vec<Option<Seat>> = contexts.iter().map(|context| context.and_then(Seat::of)).collect();
    let mut ranks: Vec<Seat> = Vec::new();
    for seat in seats.iter().flatten() {
        if !ranks.contains(seat) {
            ranks.push(*seat);
        }
    }
    let has_several = |seat: &Seat| ranks.iter().any(|rank| rank.group == seat.group && rank != seat);
    let take_turns = ranks.iter().any(has_several);
    let place = |(index, seat): (usize, &Option<Seat>)| Place {
        context: contexts[index].map_or(0, Context::key),
        device: match seat {
            Some(seat) => Some(seat.device),
            // That may take the driver.
            None => take_turns.then(|| device_of(index)).flatten(),
        },
        seat: seat.filter(has_several),
    };
    let places: Vec<Place> = seats.iter().enumerate().map(place).collect();
    in_turns(&places, stops, &mut begin)
}

/// The groups of several ranks in the list of which `check` refuses a call, and why.
pub(super) fn refused(
    contexts: &[Option<&Context>],
    check: &dyn Fn(usize) -> Result<()>,
) -> Vec<(u64, Error)> {
    let mut ranks: Vec<(u64, u32)> = Vec::new();
    for rank in contexts.iter().flatten().map(|context| (context.id(), context.rank())) {
        if !ranks.contains(&rank) {
            ranks.push(rank);
        }
    }
    let mut refused: Vec<(u64, Error)> = Vec::new();
    for (place, context) in contexts.iter().enumerate() {
        let Some(group) = context.map(Context::id) else { continue };
        let is_its = |known: u64| known == group;
        if ranks.iter().filter(|rank| is_its(rank.0)).count() > 1
            && !refused.iter().any(|known| is_its(known.0))
            && let Err(error) = check(place)
        {
            refused.push((group, error));
        }
    }
    refused
}

/// As [`begin_in_turns`], of calls with such places.
fn in_turns(
    places: &[Place],
    stops: bool,
    begin: &mut dyn FnMut(usize) -> Result<Option<Pending>>,
) -> Vec<Result<Option<Pending>>> {
    let mut results: Vec<Option<Result<Option<Pending>>>> = Vec::new();
    results.resize_with(places.len(), || None);
    let mut failed: Vec<(usize, Error)> = Vec::new();
    let mut left: Vec<usize> = (0..places.len()).collect();
    while !left.is_empty() {
        let (mut round, mut composed) = (Round::default(), Vec::new());
        left.retain(|&place| {
            let comes_behind = |seat| {
                let is_left = |other: usize| places[other].seat == Some(seat) && results[other].is_none();
                (place..places.len()).any(is_left)
            };
            if !round.takes(&places[place], comes_behind) {
                round.leave(&places[place]);
                return true;
            }
            let is_stopped_by =
                |before: usize| before < place && (stops || places[before].context == places[place].context);
            if let Some((_, error)) = failed.iter().find(|(before, _)| is_stopped_by(*before)) {
                results[place] = Some(Err(error.clone()));
                return false;
            }
            let mut begun = begin(place);
            match (&begun, places[place].seat) {
                (Ok(Some(pending)), Some(_)) if pending.is_point() => {}
                (Ok(pending), Some(seat)) => {
                    round.group = Some(seat.group);
                    round.devices.push(seat.device);
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
    results.into_iter().flatten().collect()
}

/// Notes one that cannot be begun.
fn note<T>(failed: &mut Vec<(usize, Error)>, place: usize, begun: &Result<T>) {
    if let Err(error) = begun {
        failed.push((place, error.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    /// A rank of a group that takes turns.
    const fn rank(group: u64, device: u32) -> Place {
        let seat = Some(Seat { group, device });
        Place { context: (2 * group + device as u64) as usize, device: Some(device), seat }
    }

    /// A call of another context.
    const fn other(context: usize, device: Option<u32>) -> Place {
        Place { context, device, seat: None }
    }

    /// In which order calls begin of which each is a turn.
    fn order(places: &[Place]) -> Vec<usize> {
        let mut order = Vec::new();
        let mut begin = |place| {
            order.push(place);
            Ok(None)
        };
        in_turns(places, false, &mut begin).into_iter().for_each(|begun| drop(begun.expect("it begins")));
        order
    }

    #[test]
    fn ranks_of_a_group_take_turns_and_what_is_on_one_device_keeps_its_order() {
        let [one, two] = [rank(7, 0), rank(7, 1)];
        assert_eq!(order(&[one, one, two, two]), [0, 2, 1, 3]);
        assert_eq!(order(&[one, one, one, two]), [0, 3, 1, 2]);
        let alone = other(1, Some(0));
        assert_eq!(order(&[one, alone, one, two, two]), [0, 3, 1, 2, 4], "another group's comes between");
        assert_eq!(order(&[one, one, rank(9, 0), rank(9, 1), two]), [0, 1, 2, 3, 4], "and on both devices");
        assert_eq!(order(&[alone, alone, other(2, Some(1))]), [0, 1, 2], "nobody takes turns");
    }

    #[test]
    fn what_has_no_turn_takes_none_away() {
        let [one, two] = [rank(7, 0), rank(7, 1)];
        let host = other(1, None);
        assert_eq!(order(&[one, one, host, two]), [0, 2, 3, 1], "a call on host memory");
        assert_eq!(order(&[one, other(1, Some(0)), host, two]), [0, 3, 1, 2], "but in its context's order");
        assert_eq!(order(&[one, one, other(1, Some(1)), two]), [0, 2, 3, 1], "before a rank on its device");
        assert_eq!(order(&[one, other(1, Some(2)), two]), [0, 2, 1], "on a device that no rank waits for");
    }

    #[test]
    fn what_stands_behind_a_call_that_cannot_be_begun_has_its_error_or_is_another_contexts() {
        let [one, two] = [rank(7, 0), rank(7, 1)];
        let places = [one, one, two, two, other(1, Some(0))];
        for (stops, at, due) in [
            // Place 2 begins before place 1.
            (true, 2, [false, false, true, true, true]),
            (true, 1, [false, true, false, true, true]),
            (false, 2, [false, false, true, true, false]),
            (false, 0, [true, true, false, false, false]),
        ] {
            let mut tried = Vec::new();
            let mut begin = |place| {
                tried.push(place);
                match place == at {
                    true => Err(Error::new(Status::InvalidArgument, "no such call")),
                    false => Ok(None),
                }
            };
            let failed: Vec<bool> =
                in_turns(&places, stops, &mut begin).into_iter().map(|begun| begun.is_err()).collect();
            assert_eq!(failed, due, "{stops}, {at}");
            let begins = |place: usize| place == at || !due[place];
            assert!((0..5).all(|place| tried.contains(&place) == begins(place)), "{stops}, {at}: {tried:?}");
        }
    }
}
