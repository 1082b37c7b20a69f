//! The worst that CUDA allows of calls that load, make or free something: they wait until the device has done
//! all that it was given before, with a lock held that every other call of the process needs.
//!
//! A device that waits for such a process, for a word that only a thread behind the lock would release, then
//! waits for ever. Which calls these are: the programming guide names allocations of pinned and of device
//! memory, and the first launch of a kernel that is loaded lazily; streams were seen to (an H200, driver
//! 580), and what maps or frees memory may.

use std::cell::Cell;
use std::marker::PhantomData;

use super::*;

/// While a thread has one, it has something locked that calls need to end, and is to ask the driver for
/// nothing: the double complains if it does.
pub(crate) struct Barred(PhantomData<*const ()>);

thread_local! {
    /// How many this thread has.
    static BARRED: Cell<u32> = const { Cell::new(0) };
}

impl Barred {
    pub(crate) fn new() -> Barred {
        BARRED.set(BARRED.get() + 1);
        Barred(PhantomData)
    }
}

impl Drop for Barred {
    fn drop(&mut self) {
        BARRED.set(BARRED.get() - 1);
    }
}

/// Which calls wait for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// All that may.
    All,
    /// Those that were seen to: what loads kernels, what makes streams, what frees memory.
    Seen,
}

/// The driver's lock, of one process.
pub(super) struct Lock {
    calls: Waiting,
    /// How long nothing may move before a thread that waits with the lock is said to wait for ever.
    patience: Duration,
    /// Who waits for a device with it, and in which call.
    holder: Option<(ThreadId, &'static str)>,
    /// Who waits for it, and in which call.
    waiting: Vec<(ThreadId, &'static str)>,
}

/// Calls that were seen to return while streams waited.
const RETURNED: [&str; 3] = ["cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister"];

impl Lock {
    fn is_open_to(&self, thread: ThreadId) -> bool {
        self.holder.is_none_or(|(holder, _)| holder == thread)
    }
}

impl Double {
    /// From now on these calls wait for the device, with the driver's lock held. Nothing moves for `patience`
    /// only if nothing ever will: then there is a complaint that names the calls, and the lock is given up,
    /// so that the test ends.
    pub(crate) fn hold_lock(&self, calls: Waiting, patience: Duration) {
        self.lock().driver = Some(Lock { calls, patience, holder: None, waiting: Vec::new() });
    }

    /// Whether a thread waits for a device with the lock.
    pub(crate) fn is_held(&self) -> bool {
        self.lock().driver.as_ref().is_some_and(|lock| lock.holder.is_some())
    }

    /// The program launches a kernel that is not loaded yet, on a device.
    pub(crate) fn launch_first(&self, device: u32) {
        let machine = self.admit("cuLaunchKernel of the program");
        drop(self.wait_for_device("cuLaunchKernel of the program", machine, device));
    }

    /// Has the kernels that fold loaded on a device, if they are not.
    pub(super) fn load_folds(&self, call: &'static str, device: u32) {
        let machine = self.admit(call);
        if !machine.folds.contains(&device) {
            self.wait_for_device(call, machine, device).folds.insert(device);
        }
    }

    /// Waits for the driver's lock, if a thread has it.
    pub(super) fn admit(&self, call: &'static str) -> MutexGuard<'_, Machine> {
        let thread = std::thread::current().id();
        let mut machine = self.lock();
        if BARRED.get() > 0 {
            machine.complain(format!("{call} was called with something locked that calls need to end"));
        }
        let is_open = |machine: &Machine| machine.driver.as_ref().is_none_or(|lock| lock.is_open_to(thread));
        if is_open(&machine) {
            return machine;
        }
        if let Some(lock) = &mut machine.driver {
            lock.waiting.push((thread, call));
        }
        while !is_open(&machine) {
            drop(machine);
            std::thread::sleep(Duration::from_micros(50));
            machine = self.lock();
        }
        if let Some(lock) = &mut machine.driver {
            lock.waiting.retain(|(other, _)| *other != thread);
        }
        machine
    }

    /// Waits until `device`, and the devices that reach it or are reached, have done what they were given, if
    /// calls do that.
    pub(super) fn wait_for_device<'a>(
        &'a self,
        call: &'static str,
        mut machine: MutexGuard<'a, Machine>,
        device: u32,
    ) -> MutexGuard<'a, Machine> {
        let Some(Lock { calls, patience, holder, .. }) = &mut machine.driver else { return machine };
        if *calls == Waiting::Seen && RETURNED.contains(&call) {
            return machine;
        }
        *holder = Some((std::thread::current().id(), call));
        let patience = *patience;
        let given = machine.given_to(device);
        let (mut since, mut left) = (Instant::now(), machine.pending.len());
        while machine.driver.is_some() && given.iter().any(|task| machine.pending.contains_key(task)) {
            drop(machine);
            match self.choose() {
                Some(task) => self.run(task),
                None => std::thread::sleep(Duration::from_micros(50)),
            }
            machine = self.lock();
            if left != machine.pending.len() {
                (since, left) = (Instant::now(), machine.pending.len());
            }
            if since.elapsed() > patience {
                let complaint = machine.describe_wait(call, device, &given);
                machine.complain(complaint);
                machine.driver = None;
            }
        }
        if let Some(lock) = &mut machine.driver {
            lock.holder = None;
        }
        machine
    }
}

impl Machine {
    fn describe_wait(&self, call: &str, device: u32, given: &[u64]) -> String {
        let names = |calls: &[(ThreadId, &'static str)]| {
            let mut names: Vec<&str> = calls.iter().map(|(_, call)| *call).collect();
            names.sort_unstable();
            names.dedup();
            names.join(", ")
        };
        let waiting = self.driver.as_ref().map_or_else(String::new, |lock| names(&lock.waiting));
        let tasks: Vec<String> = given.iter().filter_map(|task| self.describe_head(*task)).collect();
        format!(
            "{call} waits for device {device} for ever, with the lock that [{waiting}] need; the device waits in [{}]",
            tasks.join(", ")
        )
    }
}
