//! What streams wait for when nothing moves, for a person who looks for the reason.

use super::*;

impl Double {
    /// Nothing has moved for long, though streams have something left to do.
    pub(super) fn note_standstill(&self) {
        let mut machine = self.lock();
        if machine.standstill.is_none() && !machine.pending.is_empty() {
            machine.standstill = Some(machine.describe_standstill());
        }
    }

    /// What each stream waited for when a [`Clock`] first found that nothing had moved for long, if it ever
    /// did. No complaint: streams may wait for the host for as long as it likes.
    pub(crate) fn standstill(&self) -> Option<String> {
        self.lock().standstill.clone()
    }
}

impl Machine {
    /// The first task of each stream that has any, who has given it, and what it waits for.
    pub(super) fn describe_standstill(&self) -> String {
        let mut heads: Vec<(Queue, u64, usize)> = Vec::new();
        for (&id, pending) in &self.pending {
            match heads.iter_mut().find(|(queue, ..)| *queue == pending.queue) {
                Some((.., left)) => *left += 1,
                None => heads.push((pending.queue, id, 1)),
            }
        }
        let lines = heads.into_iter().map(|(queue, id, left)| {
            let awaited = self.awaited(id).join(" and ");
            let others = match left {
                1 => String::new(),
                _ => format!(", before {} more", left - 1),
            };
            format!("{}: {}{others} waits for {awaited}", self.name(queue), self.describe(id))
        });
        lines.collect::<Vec<_>>().join("; ")
    }

    /// What keeps a task from running.
    fn awaited(&self, id: u64) -> Vec<String> {
        let Some(pending) = self.pending.get(&id) else { return Vec::new() };
        let in_stream = |before: &u64| {
            let before = self.pending.get(before).map(|found| (*before, found.queue));
            before.map(|(before, queue)| format!("{} of {}", self.describe(before), self.name(queue)))
        };
        let mut awaited: Vec<String> = pending.after.iter().filter_map(in_stream).collect();
        if let Some((behind, before)) = pending.behind.and_then(|id| Some((id, self.pending.get(&id)?)))
            && !before.has_begun()
        {
            awaited.push(format!(
                "{} of {}, which is ahead of it in that queue",
                self.describe(behind),
                self.name(before.queue)
            ));
        }
        if !awaited.is_empty() {
            return awaited;
        }
        vec![match &pending.task {
            _ if self.running.contains(&id) => "the thread that runs it".into(),
            Task::WaitValue { address, .. } => {
                let word = self.heap.slice(Place { address: *address, bytes: 4 });
                let found = word.map(|word| u32::from_ne_bytes(word.try_into().expect("four bytes")));
                found.map_or_else(|why| why, |found| format!("that word, which is {found}"))
            }
            Task::Carry(_) => "these orders".into(),
            _ => "nothing".into(),
        }]
    }

    fn describe(&self, id: u64) -> String {
        let Some(Pending { task, channel, giver, .. }) = self.pending.get(&id) else {
            return "nothing".into();
        };
        let channel = match channel {
            None => String::new(),
            Some(Channel::Work(_, number)) => format!(" in queue {number}"),
            Some(Channel::Copies(_, number)) => format!(" in queue {number} for copies"),
        };
        let giver = giver.name().map_or_else(String::new, |name| format!(" (by thread {name})"));
        format!("{}{channel}{giver}", task.describe())
    }

    /// A stream, by how many its device had before it.
    fn name(&self, queue: Queue) -> String {
        match queue {
            Queue::Stream(handle) => match self.streams.get(&handle) {
                Some(stream) => format!(
                    "stream {} of device {} ({:?} priority)",
                    stream.index, stream.device, stream.priority
                ),
                None => format!("a stream that is gone ({:#x})", handle.0),
            },
            Queue::Legacy(device) => format!("the legacy stream of device {device}"),
            Queue::PerThread(device, _) => format!("a thread's stream of device {device}"),
            Queue::Node(_) => "a graph".into(),
        }
    }
}
