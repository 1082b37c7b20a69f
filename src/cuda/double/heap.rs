//! The double's memory: what is allocated, registered and mapped, and where it ends.

use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap};

use super::refuse;
use crate::cuda::driver::{Location, Memory};
use crate::error::Result;
use crate::sys::memory::Mapping;

/// What memory holds before anybody wrote it, and after it was freed.
const RUBBISH: u8 = 0xdb;

/// More than this is mapped and filled at its beginning alone: tests use little of a slab, and have many.
const LARGE: usize = 1 << 20;

/// A range of memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

pub(super) struct Allocation {
    place: Place,
    memory: Memory,
    pub(super) device: u32,
    number: u64,
    origin: Origin,
}

/// Where memory is from, which says who gives it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// Allocated here.
    Allocated,
    /// Allocated here, and freed. It comes back as the next memory of that size, or when the double is
    /// dropped.
    Freed,
    /// The program's, registered.
    Registered,
    /// A program's own mapping, within a range of addresses.
    Piece,
    /// Another process's, mapped here so many times.
    Mapped(usize),
}

impl Allocation {
    pub(super) fn location(&self) -> Location {
        let Place { address: base, bytes } = self.place;
        let mapped = self.origin == Origin::Piece;
        let (memory, device, buffer) = (self.memory, self.device, self.number);
        Location { memory, device, base, bytes: bytes as u64, buffer, mapped }
    }

    fn end(&self) -> u64 {
        self.place.address + self.place.bytes as u64
    }
}

/// All memory that a double knows, by its addresses.
#[derive(Default)]
pub(super) struct Heap {
    allocations: BTreeMap<u64, Allocation>,
    /// What mapped pieces lie in.
    ranges: Vec<Place>,
    /// Where memory of each size was freed, and has not come back: the last first.
    freed: HashMap<usize, Vec<u64>>,
    /// What large memory lies in.
    mappings: Vec<Mapping>,
    /// Allocations so far: tells one from another that had its address before.
    number: u64,
}

impl Heap {
    fn insert(&mut self, memory: Memory, device: u32, place: Place, origin: Origin) {
        self.number += 1;
        let allocation = Allocation { place, memory, device, number: self.number, origin };
        self.allocations.insert(place.address, allocation);
    }

    pub(super) fn allocate(&mut self, memory: Memory, device: u32, bytes: usize) -> u64 {
        let place = match self.freed.get_mut(&bytes).and_then(Vec::pop) {
            // Filled as it was freed.
            Some(address) => Place { address, bytes },
            None => self.reserve(bytes),
        };
        self.insert(memory, device, place, Origin::Allocated);
        place.address
    }

    /// New memory, filled with rubbish.
    fn reserve(&mut self, bytes: usize) -> Place {
        let address = if bytes > LARGE {
            let mapping = Mapping::private(bytes).expect("memory for the test");
            let address = mapping.address(0, bytes).expect("all of it");
            self.mappings.push(mapping);
            address.as_ptr()
        } else {
            // SAFETY: the layout has a size.
            unsafe { std::alloc::alloc(layout(bytes)) }
        };
        assert!(!address.is_null(), "no memory for the test");
        // SAFETY: just made, this long.
        unsafe { address.write_bytes(RUBBISH, bytes.min(LARGE)) };
        Place { address: address.expose_provenance() as u64, bytes }
    }

    /// Maps pieces of device memory one after the other, all in a range of addresses.
    pub(super) fn map_pieces(&mut self, device: u32, bytes: usize, pieces: usize) -> u64 {
        let range = self.reserve(bytes * pieces);
        self.ranges.push(range);
        for address in (range.address..).step_by(bytes).take(pieces) {
            self.insert(Memory::Device, device, Place { address, bytes }, Origin::Piece);
        }
        range.address
    }

    /// Marks memory as freed.
    pub(super) fn free(&mut self, address: u64) -> Result<Place> {
        let place = match self.allocations.get(&address) {
            Some(allocation) if allocation.origin == Origin::Allocated => allocation.place,
            _ => return Err(refuse("cuMemFree", "CUDA_ERROR_INVALID_VALUE")),
        };
        if let Ok(memory) = self.slice_mut(place) {
            let filled = memory.len().min(LARGE);
            memory[..filled].fill(RUBBISH);
        }
        self.allocations.entry(address).and_modify(|allocation| allocation.origin = Origin::Freed);
        self.freed.entry(place.bytes).or_default().push(address);
        Ok(place)
    }

    /// Takes in memory that its owner gives back, when it is no more registered.
    pub(super) fn register(&mut self, device: u32, place: Place) {
        self.insert(Memory::Host, device, place, Origin::Registered);
    }

    /// Bytes that are registered.
    pub(super) fn registered(&self) -> usize {
        let registered = self.allocations.values().filter(|one| one.origin == Origin::Registered);
        registered.map(|one| one.place.bytes).sum()
    }

    pub(super) fn unregister(&mut self, address: u64) -> Result<Place> {
        match self.allocations.get(&address) {
            Some(Allocation { place, origin: Origin::Registered, .. }) => {
                let place = *place;
                self.allocations.remove(&address);
                Ok(place)
            }
            _ => Err(refuse("cuMemHostUnregister", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")),
        }
    }

    /// Maps another process's memory where it is.
    pub(super) fn map(&mut self, device: u32, place: Place) {
        match self.allocations.get_mut(&place.address) {
            Some(Allocation { origin: Origin::Mapped(times), .. }) => *times += 1,
            Some(_) => {}
            None => self.insert(Memory::Device, device, place, Origin::Mapped(1)),
        }
    }

    pub(super) fn unmap(&mut self, address: u64) -> Result<()> {
        match self.allocations.get_mut(&address).map(|allocation| &mut allocation.origin) {
            Some(Origin::Mapped(1)) => drop(self.allocations.remove(&address)),
            Some(Origin::Mapped(times)) => *times -= 1,
            _ => return Err(refuse("cuIpcCloseMemHandle", "CUDA_ERROR_INVALID_VALUE")),
        }
        Ok(())
    }

    /// How often memory of other processes is mapped here.
    pub(super) fn mapped(&self) -> usize {
        let times = |allocation: &Allocation| match allocation.origin {
            Origin::Mapped(times) => times,
            _ => 0,
        };
        self.allocations.values().map(times).sum()
    }

    /// Bytes of device memory that are allocated and not freed.
    pub(super) fn allocated(&self, device: u32) -> usize {
        let own = |found: &&Allocation| !matches!(found.origin, Origin::Mapped(_) | Origin::Freed);
        let here = |found: &&Allocation| found.device == device && found.memory == Memory::Device;
        self.allocations.values().filter(own).filter(here).map(|found| found.place.bytes).sum()
    }

    /// The live allocation that a place lies in, or its first piece.
    pub(super) fn find(&self, place: Place) -> Option<&Allocation> {
        let (_, found) = self.allocations.range(..=place.address).next_back()?;
        let is_piece = |allocation: &Allocation| allocation.origin == Origin::Piece;
        let mut end = found.end();
        while let Some(next) = self.allocations.get(&end).filter(|next| is_piece(next) && is_piece(found)) {
            end = next.end();
        }
        let inside = place.address < end && place.address + place.bytes as u64 <= end;
        (inside && found.origin != Origin::Freed).then_some(found)
    }

    /// The memory of a place that lies in a live allocation.
    pub(super) fn slice(&self, place: Place) -> Result<&[u8], String> {
        match self.find(place) {
            // SAFETY: within a live allocation, which was filled; writing one takes `&mut self`.
            Some(_) => Ok(unsafe { std::slice::from_raw_parts(pointer(place.address), place.bytes) }),
            None => Err(format!("{place:x?} is no live memory")),
        }
    }

    pub(super) fn slice_mut(&mut self, place: Place) -> Result<&mut [u8], String> {
        match self.find(place) {
            // SAFETY: as above, and `self` lends it to nobody else meanwhile.
            Some(_) => Ok(unsafe { std::slice::from_raw_parts_mut(pointer(place.address), place.bytes) }),
            None => Err(format!("{place:x?} is no live memory")),
        }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        let reserved = |found: &&Allocation| matches!(found.origin, Origin::Allocated | Origin::Freed);
        let own = self.allocations.values().filter(reserved).map(|found| &found.place);
        for place in own.chain(&self.ranges).filter(|place| place.bytes <= LARGE) {
            // SAFETY: of `reserve`, with this layout, and not given back before.
            unsafe { std::alloc::dealloc(pointer(place.address), layout(place.bytes)) };
        }
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), 256).expect("a test's size")
}

/// Memory by its address.
pub(super) fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}
