//! What a call says it waits for.

use super::Staged;

impl Staged {
    /// What the call waits for, and how far its courier is, if it has one.
    pub(super) fn beside_courier(&self, awaited: String) -> String {
        match self.job.order.entry.courier() {
            Some(courier) => format!("{awaited}: {}", courier.standing()),
            None => awaited,
        }
    }

    /// What the call waits for here.
    pub(super) fn awaits(&self) -> String {
        let (device, stream) = (self.job.order.device, self.job.order.stream());
        let pieces = self.job.cut.pieces();
        let late = self.job.order.entry.courier().is_some_and(|courier| !courier.has_come());
        let needs_it = self.current.is_empty() && self.exchanged < self.issued;
        if self.carrier.is_none() || late && needs_it {
            return format!("{stream} has not come to the call");
        }
        if self.exchanged == pieces {
            return match self.delivered == pieces {
                true => {
                    format!("the copy of piece {} of {pieces} to GPU {device} has not ended", self.stored + 1)
                }
                false => format!("all {pieces} pieces are here, but {stream} has not come to the call"),
            };
        }
        let next = self.exchanged + 1;
        match self.current.get(0) {
            Some(_) => format!("piece {next} of {pieces} waits for other ranks"),
            None if self.exchanged < self.issued => {
                format!("the copy of piece {next} of {pieces} from GPU {device} has not ended")
            }
            None if self.stored < self.delivered => {
                format!("the copy of piece {} of {pieces} to GPU {device} has not ended", self.stored + 1)
            }
            None if late => format!("{stream} has not come to the call"),
            None => {
                let piece = self.delivered.min(self.exchanged) + 1;
                format!("no pinned memory is free for piece {piece} of {pieces}")
            }
        }
    }
}
