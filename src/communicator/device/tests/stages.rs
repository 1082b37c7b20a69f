//! Broadcasts by stages.

use super::*;

/// A broadcast by stages from rank 0: the double writes what its kernel was told.
pub(super) fn by_stages(context: &Context, output: u64, max_blocks: u32) -> OnDevices {
    let (group, exchange) = exchange(context);
    let pull = Pull {
        stages: Stages::Two,
        input: output,
        output,
        bytes: 8,
        root: 0,
        seen: None,
        max_blocks,
        multiprocessors: 0,
        overlap: crate::cuda::exchange::Overlap::Off,
    };
    let signature = Signature {
        kind: Kind::Broadcast,
        dtype: DataType::U32,
        operator: 0,
        algorithm: 22,
        root: 0,
        count: 2,
        device: true,
    };
    let caller = Caller { stream: None, timeout: Some(PATIENCE), memory: "buffer" };
    OnDevices { group, exchange, caller, what: What::Pull(pull, signature) }
}

#[test]
fn ranks_agree_on_the_least_blocks_that_any_of_them_allows() {
    ranks(&processes(3), words, |context, (double, devices, device)| {
        let output = double.memory(*device, 8);
        let told = |context: &Context, max_blocks| {
            run(&by_stages(context, output, max_blocks)).expect("a broadcast");
            word(double, output)
        };
        assert_eq!([told(context, 0), told(context, 7)], [0, 7]);
        context.limit_blocks([0, 24, 40][context.rank() as usize]);
        assert_eq!(told(context, 0), 0, "it was agreed before");
        let child = context.duplicate().expect("a child");
        meet(&[(&child, *device)], || Ok(devices.clone()), choose, words).expect("an agreement");
        assert_eq!([told(&child, 0), told(&child, 7), told(&child, 30)], [24, 7, 24]);
    });
}

#[test]
fn calls_that_allow_different_blocks_fail_and_name_both() {
    let errors = ranks(&processes(2), words, |context, (double, _, device)| {
        let call = by_stages(context, double.memory(*device, 8), 8 * context.rank());
        run(&call).unwrap_err().text().to_owned()
    });
    for error in errors {
        let same = "broadcast(2 × uint32, root 0, algorithm 22) on device memory";
        for part in [same, "no limit to the blocks", "at most 8 blocks", "rank 0", "rank 1"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn the_root_is_read_in_place_where_all_ranks_share_its_process() {
    let readable = |seats: &[Seat]| -> Vec<u32> {
        ranks(seats, words, |context, (double, _, device)| {
            let output = double.memory(*device, 8);
            run(&by_stages(context, output, 0)).expect("a broadcast");
            word(double, output + 4)
        })
    };
    assert_eq!(readable(&processes(2)), [0, 0]);
    let (double, devices) = process(2);
    // Only the root knows its input.
    assert_eq!(readable(&[(double.clone(), devices.clone(), 0), (double, devices, 1)]), [1, 0]);
}

#[test]
fn broadcasts_by_stages_are_refused_where_they_cannot_be() {
    let seats = processes(2);
    seats[1].0.forbid_sharing();
    ranks(&seats, words, |context, _| {
        let refused = |kind, tag| {
            let mut memory = [0u32; 2];
            let request = Request {
                kind,
                input: memory.as_ptr().cast(),
                output: memory.as_mut_ptr().cast(),
                counts: Counts::Uniform(2),
                dtype: DataType::U32,
                operator: Operator::Sum,
                root: 0,
            };
            let call = Call { algorithm: Some(21), tag, ..Call::default() };
            // SAFETY: the memory outlives the call.
            unsafe { context.run(&request, &call) }.unwrap_err().text().to_owned()
        };
        let text = refused(Kind::Allreduce, None);
        assert_eq!(text, "algorithm 'broadcast-one-stage' serves broadcast, not allreduce");
        let text = refused(Kind::Broadcast, Some(3));
        assert!(text.contains("takes no tag"), "{text}");
        let text = refused(Kind::Broadcast, None);
        assert!(
            text.contains("for GPUs that reach each other") && text.contains("shares no memory"),
            "{text}"
        );
    });
}
