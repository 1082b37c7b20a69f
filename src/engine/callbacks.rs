//! Completion callbacks. They are the program's code, and may start operations: so they are not called within
//! each other, nor where this thread holds what those need, but by a thread of the library then. Nor on the
//! service thread: one that takes long would keep everything from the process, and one that exits would keep
//! the goodbyes from being said. Driver threads must not call them either, since they may make no CUDA calls.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::endpoint::lock;
use super::operation::Completion;
use crate::error::Result;
use crate::sys::global::Global;
use crate::sys::{fork, process};
use crate::transport::service::on_service_thread;

/// What is called when an operation has ended. It must not wait for another operation: it may run in a thread
/// that others rely on to be woken, and where the library has no thread for it on the service thread, through
/// which answers come. It may start operations.
pub type Callback = Box<dyn FnOnce(Result<Completion>) + Send>;

/// Whether an operation has ended, and how.
type Look = Box<dyn FnMut() -> Option<Result<Completion>> + Send>;

thread_local! {
    static CALLING_BACK: Cell<bool> = const { Cell::new(false) };
    static HELD_BACK: Cell<u32> = const { Cell::new(0) };
}

/// Whether this thread is in a callback, which must not wait.
pub fn is_calling_back() -> bool {
    CALLING_BACK.get()
}

/// Calls a callback: in this thread, unless they are held back here.
pub fn call_back(callback: Callback, result: Result<Completion>) {
    call_back_here(may_call(), callback, result);
}

/// As [`call_back`], for one that is asked for after the end. That may be within another callback, which may
/// itself have been asked for so: they would be within each other without end.
pub fn call_back_late(callback: Callback, result: Result<Completion>) {
    call_back_here(may_call() && !is_calling_back(), callback, result);
}

/// Whether this thread may call any.
fn may_call() -> bool {
    HELD_BACK.get() == 0 && !on_service_thread()
}

fn call_back_here(here: bool, callback: Callback, result: Result<Completion>) {
    // Better in the wrong place than not at all.
    if here || ENDED.ensure_thread().is_err() {
        let before = CALLING_BACK.replace(true);
        callback(result);
        CALLING_BACK.set(before);
    } else {
        ENDED.add(Box::new(move || Some(result.clone())), callback);
    }
}

/// Calls a callback with what `look` finds, from a thread that looks every now and then. `look` does not
/// wait.
pub fn call_back_when(look: impl FnMut() -> Option<Result<Completion>> + Send + 'static, then: Callback) {
    if let Err(error) = RUNNING.ensure_thread() {
        log::error!("no thread can be started that calls back; the next callback tries again: {error}");
    }
    RUNNING.add(Box::new(look), then);
}

/// Until it is dropped this thread calls no callbacks: it holds what operations need that they may start.
pub struct HeldBack(PhantomData<*const ()>);

/// Has this thread call none from here on.
pub fn hold_back() -> HeldBack {
    HELD_BACK.set(HELD_BACK.get() + 1);
    HeldBack(PhantomData)
}

impl Drop for HeldBack {
    fn drop(&mut self) {
        HELD_BACK.set(HELD_BACK.get() - 1);
    }
}

/// Between two looks at what has not ended.
const NAP: Duration = Duration::from_micros(100);

/// For operations that have ended in a thread that holds callbacks back. Apart from the other, whose looks
/// ask the driver.
static ENDED: Caller = Caller::new("unisono-notify");
/// For those that streams do.
static RUNNING: Caller = Caller::new("unisono-watch");

/// A thread that calls back. It is started when it is first needed, and sleeps when there is nothing to look
/// at.
struct Caller {
    name: &'static str,
    /// In which process: a forked child has no thread of its parent's, and what that holds is the parent's to
    /// give back.
    inbox: Global<Option<(u32, &'static Inbox)>>,
}

/// What the thread is to call.
#[derive(Default)]
struct Inbox {
    list: Mutex<List>,
    added: Condvar,
}

#[derive(Default)]
struct List {
    has_thread: bool,
    added: Vec<(Look, Callback)>,
}

impl Caller {
    const fn new(name: &'static str) -> Caller {
        Caller { name, inbox: Global::last(None) }
    }

    fn inbox(&'static self) -> &'static Inbox {
        let process = fork::generation();
        if let Some((made, inbox)) = *self.inbox.read()
            && made == process
        {
            return inbox;
        }
        match &mut *self.inbox.write() {
            Some((made, inbox)) if *made == process => inbox,
            // One for each process: never freed.
            other => other.insert((process, Box::leak(Box::default()))).1,
        }
    }

    fn ensure_thread(&'static self) -> io::Result<()> {
        let inbox = self.inbox();
        self.ensure(|name| process::spawn(name, || inbox.run()).map(drop))
    }

    fn ensure(&'static self, spawn: impl FnOnce(&str) -> io::Result<()>) -> io::Result<()> {
        let mut list = lock(&self.inbox().list);
        if !list.has_thread {
            spawn(self.name)?;
            list.has_thread = true;
        }
        Ok(())
    }

    fn add(&'static self, look: Look, then: Callback) {
        let inbox = self.inbox();
        lock(&inbox.list).added.push((look, then));
        inbox.added.notify_one();
    }
}

impl Inbox {
    fn run(&self) {
        let mut running = Vec::new();
        loop {
            let mut list = lock(&self.list);
            while running.is_empty() && list.added.is_empty() {
                list = self.added.wait(list).unwrap_or_else(PoisonError::into_inner);
            }
            running.append(&mut list.added);
            drop(list);
            let before = running.len();
            let mut rest = Vec::with_capacity(before);
            for (mut look, then) in running {
                match look() {
                    Some(result) => {
                        // What it holds may be the last of a group, and callbacks take as long as they like.
                        drop(look);
                        call_back(then, result);
                    }
                    None => rest.push((look, then)),
                }
            }
            running = rest;
            if running.len() == before {
                std::thread::sleep(NAP);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};

    use super::*;

    fn tell(to: &mpsc::Sender<ThreadId>) -> Callback {
        let to = to.clone();
        Box::new(move |_| to.send(thread::current().id()).expect("the test listens"))
    }

    #[test]
    fn what_is_held_back_another_thread_calls() {
        let (to, told) = mpsc::channel();
        let this = thread::current().id();
        let held = hold_back();
        drop(hold_back());
        call_back(tell(&to), Ok(Completion::default()));
        assert_ne!(told.recv_timeout(Duration::from_secs(20)), Ok(this));
        drop(held);
        call_back(tell(&to), Ok(Completion::default()));
        assert_eq!(told.try_recv(), Ok(this));
    }

    #[test]
    fn what_a_callback_asks_for_late_is_not_called_within_it() {
        let (to, told) = mpsc::channel();
        let this = thread::current().id();
        let (inner, outer) = (tell(&to), tell(&to));
        let both = move |result: Result<Completion>| {
            call_back_late(inner, result.clone());
            outer(result);
        };
        call_back_late(Box::new(both), Ok(Completion::default()));
        let threads = [(); 2].map(|()| told.recv_timeout(Duration::from_secs(20)).expect("it is called"));
        assert_eq!(threads.iter().filter(|thread| **thread == this).count(), 1);
    }

    #[test]
    fn the_kernel_keeps_the_names_of_the_threads_whole() {
        for caller in [&ENDED, &RUNNING] {
            assert!(caller.name.len() <= 15, "{}", caller.name);
        }
    }

    #[test]
    fn a_thread_that_could_not_be_started_is_tried_again() {
        static CALLER: Caller = Caller::new("test");
        let refuse = |_: &str| Err(io::ErrorKind::WouldBlock.into());
        assert!(CALLER.ensure(refuse).is_err());
        let mut started = 0;
        for _ in 0..2 {
            let start = |_: &str| {
                started += 1;
                Ok(())
            };
            CALLER.ensure(start).expect("it starts");
        }
        assert_eq!(started, 1);
    }

    #[test]
    fn a_child_that_is_forked_while_its_parent_hands_callbacks_over_has_a_list_of_its_own() {
        static CALLER: Caller = Caller::new("test");
        CALLER.ensure(|_| Ok(())).expect("it starts");
        let list = lock(&CALLER.inbox().list);
        let starts_its_own = fork::tests::in_a_child(|| {
            let mut started = false;
            let start = |_: &str| {
                started = true;
                Ok(())
            };
            CALLER.ensure(start).is_ok() && started
        });
        drop(list);
        assert!(starts_its_own);
    }
}
