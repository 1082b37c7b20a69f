//! What a process has once for each device.

#![forbid(unsafe_code)]

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use once_cell::sync::OnceCell;

use super::context::Devices;
use crate::error::Result;

/// A `T` for each device, made when it is first asked for and kept. While one is made, which may wait for its
/// device, whoever wants the same waits, and nobody else.
pub(crate) struct ByDevice<T>(Mutex<Vec<Place<T>>>);

struct Place<T> {
    /// Keeps their address from being that of others.
    devices: Arc<Devices>,
    device: u32,
    made: Arc<OnceCell<T>>,
}

impl<T: Clone> ByDevice<T> {
    /// Nothing is made yet.
    pub(crate) const fn new() -> ByDevice<T> {
        ByDevice(Mutex::new(Vec::new()))
    }

    /// What is there for a device of `devices`; if nothing is, it is what `make` makes, unless that fails.
    pub(crate) fn get_or_make(
        &self,
        devices: &Arc<Devices>,
        device: u32,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let made = {
            let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match places.iter().find(|place| place.is_of(devices, device)) {
                Some(place) => match place.made.get() {
                    Some(made) => return Ok(made.clone()),
                    None => place.made.clone(),
                },
                None => {
                    let made = Arc::default();
                    places.push(Place { devices: devices.clone(), device, made: Arc::clone(&made) });
                    made
                }
            }
        };
        made.get_or_try_init(make).cloned()
    }

    /// What is there for a device.
    pub(crate) fn get(&self, devices: &Devices, device: u32) -> Option<T> {
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.iter().find(|place| place.is_of(devices, device))?.made.get().cloned()
    }
}

impl<T> Place<T> {
    fn is_of(&self, devices: &Devices, device: u32) -> bool {
        self.device == device && std::ptr::eq(&*self.devices, devices)
    }
}

impl<T> fmt::Debug for ByDevice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ByDevice")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::cuda::double::{Double, Order};
    use crate::error::{Error, Status};

    #[test]
    fn making_one_holds_up_no_other_device() {
        let devices = Devices::over(Double::new(2, Order::Eager)).expect("a driver");
        let things: ByDevice<u32> = ByDevice::new();
        let (goes_on, waits) = mpsc::channel();
        let (begins, has_begun) = mpsc::channel();
        std::thread::scope(|scope| {
            let (things, devices) = (&things, &devices);
            let slow = scope.spawn(move || {
                things.get_or_make(devices, 0, || {
                    begins.send(()).expect("the test listens");
                    waits.recv().expect("the other device was served");
                    Ok(10)
                })
            });
            has_begun.recv().expect("it begins");
            assert_eq!(things.get_or_make(devices, 1, || Ok(11)), Ok(11));
            assert_eq!((things.get(devices, 0), things.get(devices, 1)), (None, Some(11)));
            goes_on.send(()).expect("the thread waits");
            assert_eq!(slow.join().expect("no panic"), Ok(10));
        });
        assert_eq!(things.get_or_make(&devices, 0, || Ok(12)), Ok(10), "it is made once");
    }

    #[test]
    fn what_could_not_be_made_is_tried_again() {
        let devices = Devices::over(Double::new(1, Order::Eager)).expect("a driver");
        let things: ByDevice<u32> = ByDevice::new();
        let refused = || Err(Error::new(Status::Cuda, "not now".to_owned()));
        assert!(things.get_or_make(&devices, 0, refused).is_err());
        assert_eq!(things.get_or_make(&devices, 0, || Ok(1)), Ok(1));
        // Others' devices are others.
        let others = Devices::over(Double::new(1, Order::Eager)).expect("a driver");
        assert_eq!(things.get(&others, 0), None);
    }
}
