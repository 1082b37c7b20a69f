//! Memory: allocation, and the registrations that NCCL's clients make.
//!
//! Symmetric windows are mapped by all ranks, which then read and write each other's memory there. Other
//! registrations change nothing: one rank's word binds no other, and every call takes ordinary memory, which
//! it stages. They are checked and given a handle, so that clients' own bookkeeping works and mistakes are
//! found.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};

use unisono::communicator::Window;
use unisono::cuda::memory::DeviceBuffer;
use unisono::sys::global::Global;

use crate::abi::{ncclComm_t, ncclResult_t, ncclWindow_t};
use crate::communicator::{self, Communicator};
use crate::error::{Result, SUCCESS, fail, guard, out};
use crate::group::{self, in_group};
use crate::handle::Table;
use crate::place::{Place, devices};
use crate::setup::Sharing;

/// What ncclMemAlloc gave out, by address.
static ALLOCATED: Global<BTreeMap<usize, Allocation>> = Global::new(BTreeMap::new());

enum Allocation {
    OnDevice(DeviceBuffer),
    OnHost(Layout),
}

/// As windows must be aligned.
const PAGE: usize = 4096;

/// Allocates `size` bytes on the current device and writes their address to `*ptr`; NULL for no bytes. It is
/// memory as cudaMalloc gives it: calls are as fast on that, and either can become a window
/// (ncclCommWindowRegister).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> ncclResult_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let out = unsafe { out(ptr, "ptr") }?;
        if size == 0 {
            out.write(std::ptr::null_mut());
            return Ok(SUCCESS);
        }
        let (address, allocation) = allocate(size)?;
        // What had the address before was given back otherwise, by cudaFree, and is not to be freed again.
        std::mem::forget(ALLOCATED.write().insert(address.addr(), allocation));
        out.write(address);
        Ok(SUCCESS)
    })
}

fn allocate(size: usize) -> Result<(*mut c_void, Allocation)> {
    match Place::here()? {
        Place::Device(device) => {
            let buffer = DeviceBuffer::new(&devices()?, device, size)?;
            let address = std::ptr::with_exposed_provenance_mut(buffer.address() as usize);
            Ok((address, Allocation::OnDevice(buffer)))
        }
        Place::Host(_) => {
            let Ok(layout) = Layout::from_size_align(size, PAGE) else {
                fail!(InvalidArgument, "size is {size}, more than there is room for in an address space");
            };
            // SAFETY: the size is not zero.
            let address = unsafe { alloc(layout) };
            if address.is_null() {
                fail!(OutOfMemory, "{size} bytes of host memory cannot be had");
            }
            Ok((address.cast(), Allocation::OnHost(layout)))
        }
    }
}

/// Frees what ncclMemAlloc gave out. May wait for the device. NULL is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemFree(ptr: *mut c_void) -> ncclResult_t {
    guard(|| {
        if ptr.is_null() {
            return Ok(SUCCESS);
        }
        // Taken out in a statement of its own: freeing may take long, without the lock.
        let allocation = ALLOCATED.write().remove(&ptr.addr());
        match allocation {
            Some(Allocation::OnDevice(buffer)) => drop(buffer),
            // SAFETY: from `alloc` with this layout, and taken out of the list once.
            Some(Allocation::OnHost(layout)) => unsafe { dealloc(ptr.cast(), layout) },
            None => fail!(InvalidArgument, "ptr ({ptr:p}) is not from ncclMemAlloc, or was freed before"),
        }
        Ok(SUCCESS)
    })
}

/// A buffer that a client has registered.
pub(crate) struct Registration {
    communicator: usize,
    address: usize,
    /// What all ranks have mapped.
    window: OnceLock<Window>,
}

static REGISTRATIONS: Table<Registration> = Table::new();
static WINDOWS: Table<Registration> = Table::new();

impl Registration {
    fn new(comm: ncclComm_t, buff: *mut c_void, size: usize) -> Result<Arc<Registration>> {
        communicator::find(comm)?.open_group()?;
        if buff.is_null() {
            fail!(InvalidArgument, "buff is NULL");
        }
        if size == 0 {
            fail!(InvalidArgument, "size is 0: there is nothing to register");
        }
        let (communicator, address) = (comm.addr(), buff.expose_provenance());
        Ok(Arc::new(Registration { communicator, address, window: OnceLock::new() }))
    }

    /// What all ranks have mapped.
    pub(crate) fn window(&self) -> Result<&Window> {
        match self.window.get() {
            Some(window) => Ok(window),
            None => fail!(
                InvalidUsage,
                "other ranks have not mapped the window: register it with NCCL_WIN_COLL_SYMMETRIC, in device memory"
            ),
        }
    }

    /// Refuses a buffer of so many bytes that no address space has.
    fn check_end(&self, size: usize) -> Result<()> {
        if self.address.checked_add(size).is_none() {
            fail!(InvalidArgument, "size is {size}: the buffer ends beyond the address space");
        }
        Ok(())
    }

    /// Has all ranks map it. What cannot be is refused here: the others are waiting to hear of it.
    fn share(&self, communicator: &Communicator, size: usize) -> Result<()> {
        match communicator.place {
            Place::Host(_) => self.check_end(size),
            Place::Device(_) => {
                let window =
                    communicator.called_group()?.register_window(self.address as u64, size as u64)?;
                // It is shared once.
                let _ = self.window.set(window);
                Ok(())
            }
        }
    }

    /// Takes one of `comm` back.
    fn end<H>(
        table: &'static Table<Registration>,
        comm: ncclComm_t,
        handle: *mut H,
        name: &str,
    ) -> Result<()> {
        communicator::find(comm)?;
        match table.find(handle) {
            Some(found) if found.communicator == comm.addr() => {
                table.take(handle);
                Ok(())
            }
            Some(_) => fail!(InvalidUsage, "{name} was registered with another communicator"),
            None => fail!(InvalidUsage, "{name} was never registered, or was deregistered before"),
        }
    }
}

/// Takes back what was registered with the communicator of this number, which has ended.
pub(crate) fn forget(communicator: usize) {
    for table in [&REGISTRATIONS, &WINDOWS] {
        table.take_all(|registration| registration.communicator == communicator);
    }
}

/// What one of a communicator's windows was registered as.
pub(crate) fn window_of(comm: ncclComm_t, win: ncclWindow_t, name: &str) -> Result<Arc<Registration>> {
    match WINDOWS.find(win) {
        Some(window) if window.communicator == comm.addr() => Ok(window),
        _ => fail!(InvalidArgument, "{name} is no window of this communicator"),
    }
}

/// Checks a buffer and writes a handle to `*handle`, for ncclCommDeregister. It changes nothing else: no
/// other rank hears of it, so none maps the buffer, and calls on it are staged as on any memory, through
/// memory of this library. What spares the staging is a window of all ranks: ncclCommWindowRegister with
/// NCCL_WIN_COLL_SYMMETRIC.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    comm: ncclComm_t,
    buff: *mut c_void,
    size: usize,
    handle: *mut *mut c_void,
) -> ncclResult_t {
    guard(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(handle, "handle") }?;
        let registration = Registration::new(comm, buff, size)?;
        registration.check_end(size)?;
        place.write(REGISTRATIONS.insert(registration));
        Ok(SUCCESS)
    })
}

/// Ends a registration. A NULL `handle` is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t {
    guard(|| {
        if !handle.is_null() {
            Registration::end(&REGISTRATIONS, comm, handle, "handle")?;
        }
        Ok(SUCCESS)
    })
}

/// ncclCommWindowRegister: no promise.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_WIN_DEFAULT: c_int = 0;
/// ncclCommWindowRegister: every rank registers, and calls on it use the same offset on all ranks. (This
/// library asks less: that all ranks of a call have what it shares in such windows, or none: see
/// ncclCommWindowRegister.)
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_WIN_COLL_SYMMETRIC: c_int = 1;
/// ncclCommWindowRegister: what is put there comes in the order in which it is sent, which it does anyway.
#[allow(unreachable_pub, reason = "for the header")]
pub const NCCL_WIN_STRICT_ORDERING: c_int = 2;

/// Registers a buffer as a window and writes a handle to `*win`. With NCCL_WIN_COLL_SYMMETRIC every rank of
/// `comm` calls it, between the same two calls, in a group if one thread has several: it waits for the
/// others. Long calls stage nothing where such windows hold what they share: the results of ncclAllGather,
/// ncclAlltoAll and ncclBroadcast, what ncclReduceScatter is given, both of ncclAllReduce. In a group the
/// handle is there at its end, NULL if the window could not be shared. Where GPUs exchange and a rank gives
/// what is no memory of its GPU, all get ncclInvalidArgument, and ncclGetLastError names the rank. A NULL
/// `buff`, or no bytes, is no window: `*win` stays as it is. With other flags it changes nothing, like
/// ncclCommRegister. Windows cannot be given to kernels (see ncclDevCommCreate).
///
/// In each call, all ranks have what it shares in windows, or none has. Otherwise the communicator fails, but
/// calls in graphs are not compared: where they differ, in this or otherwise, a kernel that shares memory in
/// windows may take the data of the other call for addresses, and read and write there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    comm: ncclComm_t,
    buff: *mut c_void,
    size: usize,
    win: *mut ncclWindow_t,
    winFlags: c_int,
) -> ncclResult_t {
    in_group(|| {
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(win, "win") }?;
        if winFlags & !(NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING) != 0 {
            fail!(
                InvalidArgument,
                "winFlags is {winFlags:#x}; it is NCCL_WIN_DEFAULT (0), NCCL_WIN_COLL_SYMMETRIC (1), \
                 NCCL_WIN_STRICT_ORDERING (2), or both"
            );
        }
        if buff.is_null() || size == 0 {
            communicator::find(comm)?.open_group()?;
            return Ok(SUCCESS);
        }
        let registration = Registration::new(comm, buff, size)?;
        if winFlags & NCCL_WIN_COLL_SYMMETRIC == 0 {
            registration.check_end(size)?;
            place.write(WINDOWS.insert(registration));
            return Ok(SUCCESS);
        }
        let communicator = communicator::find(comm)?;
        place.write(std::ptr::null_mut());
        let (inner, handle) = (communicator.clone(), Handle(win));
        let share = Box::new(move || {
            registration.share(&inner, size)?;
            handle.write(WINDOWS.insert(registration));
            Ok(())
        });
        group::share(Sharing { communicator, share })?;
        Ok(SUCCESS)
    })
}

/// Where a client wants the handle of a window, while its group ends.
struct Handle(*mut ncclWindow_t);

// SAFETY: the client's thread waits in the group's end for the one that writes there.
unsafe impl Send for Handle {}

impl Handle {
    fn write(self, window: ncclWindow_t) {
        // SAFETY: the contract of the header: writable until the group ends.
        unsafe { self.0.write(window) };
    }
}

/// Ends a window, on every rank between the same two calls. Waits for no other rank. A NULL `win` is fine.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(comm: ncclComm_t, win: ncclWindow_t) -> ncclResult_t {
    guard(|| {
        if !win.is_null() {
            Registration::end(&WINDOWS, comm, win, "win")?;
        }
        Ok(SUCCESS)
    })
}

/// Writes the address that a window was registered with to `*outUserPtr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclWinGetUserPtr(
    comm: ncclComm_t,
    win: ncclWindow_t,
    outUserPtr: *mut *mut c_void,
) -> ncclResult_t {
    guard(|| {
        communicator::find(comm)?;
        // SAFETY: the contract of the header: NULL or writable.
        let place = unsafe { out(outUserPtr, "outUserPtr") }?;
        let window = window_of(comm, win, "win")?;
        place.write(std::ptr::with_exposed_provenance_mut(window.address));
        Ok(SUCCESS)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::end;

    #[test]
    fn what_is_registered_with_a_communicator_ends_with_it() {
        for end in [end::ncclCommDestroy, end::ncclCommAbort] {
            let [comm, other] = [(); 2].map(|()| {
                let communicator = Communicator::new(Place::Host(0), Config::unset(), Vec::new());
                communicator.meet(|_| Communicator::alone(&communicator).cloned().map(Some));
                communicator.give_handle()
            });
            let mut bytes = [0u8; 64];
            let [mut first, mut second] = [std::ptr::null_mut(); 2];
            let mut window = std::ptr::null_mut();
            // SAFETY: live memory.
            let registered = unsafe {
                [
                    ncclCommRegister(comm, bytes.as_mut_ptr().cast(), 64, &mut first),
                    ncclCommRegister(other, bytes.as_mut_ptr().cast(), 64, &mut second),
                    ncclCommWindowRegister(
                        comm,
                        bytes.as_mut_ptr().cast(),
                        64,
                        &mut window,
                        NCCL_WIN_DEFAULT,
                    ),
                ]
            };
            assert_eq!((registered, end(comm)), ([SUCCESS; 3], SUCCESS));
            assert!(REGISTRATIONS.find(first).is_none() && WINDOWS.find(window).is_none());
            assert_eq!([ncclCommDeregister(other, second), end(other)], [SUCCESS; 2]);
        }
    }
}
