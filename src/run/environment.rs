//! What a rank finds in its environment.

/// The variables that are the same for all ranks of a job.
pub(super) struct Environment {
    /// How many ranks there are, all on this host.
    pub(super) size: usize,
    /// The unique id, in hexadecimal.
    pub(super) id: String,
    /// Where a program that brings its own store may open it.
    pub(super) master_port: u16,
}

impl Environment {
    /// All variables of one rank: torchrun's, which programs for PyTorch read, and unisono's own.
    pub(super) fn of_rank(&self, rank: usize) -> [(&'static str, String); 11] {
        let (rank, size) = (rank.to_string(), self.size.to_string());
        [
            ("RANK", rank.clone()),
            ("WORLD_SIZE", size.clone()),
            ("LOCAL_RANK", rank.clone()),
            ("LOCAL_WORLD_SIZE", size.clone()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", self.master_port.to_string()),
            ("UNISONO_RANK", rank.clone()),
            ("UNISONO_SIZE", size.clone()),
            ("UNISONO_LOCAL_RANK", rank),
            ("UNISONO_LOCAL_SIZE", size),
            ("UNISONO_ID", self.id.clone()),
        ]
    }
}
