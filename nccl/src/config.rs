//! What a communicator's config says, parsed: whatever version of the struct a client was compiled with.

use std::ffi::{c_int, c_uint};
use std::mem::{MaybeUninit, offset_of};

use crate::abi::{MAGIC, UNSET, ncclConfig_t};
use crate::error::{Result, fail, text};
use crate::settings;

/// How a communicator is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// Whether creating, splitting and finalizing wait.
    pub(crate) blocking: bool,
    /// Blocks of a kernel at most.
    pub(crate) max_ctas: Option<u32>,
    /// Named in errors and logs.
    pub(crate) name: Option<String>,
}

/// The first version of the struct ended after `blocking`.
const SMALLEST: usize = offset_of!(ncclConfig_t, cgaClusterSize);
/// Larger than any config will be: a size beyond it was never set.
const LARGEST: usize = 4096;

/// The fields after `blocking`, with the version of NCCL whose header has them first. A client's struct may
/// end in padding where a later version has a field, so its size alone does not tell. The last one stands for
/// itself and `nvlinkCentricSched`, which came with it.
const FIELDS: [(usize, c_uint); 12] = [
    (offset_of!(ncclConfig_t, cgaClusterSize), 21700),
    (offset_of!(ncclConfig_t, minCTAs), 21700),
    (offset_of!(ncclConfig_t, maxCTAs), 21700),
    (offset_of!(ncclConfig_t, netName), 21700),
    (offset_of!(ncclConfig_t, splitShare), 21800),
    (offset_of!(ncclConfig_t, trafficClass), 22600),
    (offset_of!(ncclConfig_t, commName), 22700),
    (offset_of!(ncclConfig_t, collnetEnable), 22700),
    (offset_of!(ncclConfig_t, CTAPolicy), 22700),
    (offset_of!(ncclConfig_t, shrinkShare), 22700),
    (offset_of!(ncclConfig_t, nvlsCTAs), 22700),
    (offset_of!(ncclConfig_t, nChannelsPerNetPeer), 22800),
];

/// A config of which nothing is set.
const UNSET_CONFIG: ncclConfig_t = ncclConfig_t {
    size: size_of::<ncclConfig_t>(),
    magic: MAGIC,
    version: 0,
    blocking: UNSET,
    cgaClusterSize: UNSET,
    minCTAs: UNSET,
    maxCTAs: UNSET,
    netName: std::ptr::null(),
    splitShare: UNSET,
    trafficClass: UNSET,
    commName: std::ptr::null(),
    collnetEnable: UNSET,
    CTAPolicy: UNSET,
    shrinkShare: UNSET,
    nvlsCTAs: UNSET,
    nChannelsPerNetPeer: UNSET,
    nvlinkCentricSched: UNSET,
};

impl Config {
    /// Of which nothing is said.
    const UNSET: Config = Config { blocking: true, max_ctas: None, name: None };

    /// What a communicator without a config is.
    pub(crate) fn unset() -> Config {
        Config::UNSET.overridden(&Overrides::read())
    }

    /// What the user says goes before what the program says.
    fn overridden(self, by: &Overrides) -> Config {
        Config {
            blocking: by.blocking.unwrap_or(self.blocking),
            max_ctas: by.max_ctas.or(self.max_ctas),
            ..self
        }
    }

    /// What the client asks for. Without a config it is as `parent`; what a config leaves unset is as if
    /// there were no parent.
    ///
    /// # Safety
    /// `config` is NULL or points to as many readable bytes as its first field says, and its texts are NULL
    /// or C strings.
    pub(crate) unsafe fn parse(config: *const ncclConfig_t, parent: &Config) -> Result<Config> {
        if config.is_null() {
            // A child has a name of its own.
            return Ok(Config { name: None, ..parent.clone() }.overridden(&Overrides::read()));
        }
        // SAFETY: this function's contract.
        let given = unsafe { copied(config) }?;
        let flag = |name: &str, value: c_int| -> Result<Option<bool>> {
            Ok(in_range(name, value, 0, 1)?.map(|value| value != 0))
        };
        flag("splitShare", given.splitShare)?;
        flag("shrinkShare", given.shrinkShare)?;
        flag("collnetEnable", given.collnetEnable)?;
        flag("nvlinkCentricSched", given.nvlinkCentricSched)?;
        in_range("cgaClusterSize", given.cgaClusterSize, 0, c_int::MAX)?;
        in_range("trafficClass", given.trafficClass, c_int::MIN, c_int::MAX)?;
        in_range("CTAPolicy", given.CTAPolicy, 0, 3)?;
        in_range("nvlsCTAs", given.nvlsCTAs, 1, c_int::MAX)?;
        in_range("nChannelsPerNetPeer", given.nChannelsPerNetPeer, 1, c_int::MAX)?;
        let min = in_range("minCTAs", given.minCTAs, 1, c_int::MAX)?;
        let max = in_range("maxCTAs", given.maxCTAs, 1, c_int::MAX)?;
        if let (Some(min), Some(max)) = (min, max)
            && min > max
        {
            fail!(InvalidArgument, "config->minCTAs is {min}, but config->maxCTAs is {max}");
        }
        // SAFETY: this function's contract.
        if let Some(network) = unsafe { text(given.netName) }
            && !network.eq_ignore_ascii_case("socket")
        {
            log::warn!(
                "config->netName is \"{network}\", but between hosts there is TCP alone: that is used"
            );
        }
        let config = Config {
            blocking: flag("blocking", given.blocking)?.unwrap_or(Config::UNSET.blocking),
            max_ctas: max.map(c_int::unsigned_abs),
            // SAFETY: this function's contract.
            name: unsafe { text(given.commName) }.filter(|name| !name.is_empty()),
        };
        Ok(config.overridden(&Overrides::read()))
    }
}

/// What NCCL's settings say of communicators, whatever their configs say.
#[derive(Debug, Default)]
struct Overrides {
    blocking: Option<bool>,
    max_ctas: Option<u32>,
}

impl Overrides {
    fn read() -> Overrides {
        let positive = |number: i64| {
            let positive = u32::try_from(number).ok().filter(|&number| number > 0);
            if positive.is_none() {
                log::warn!("NCCL_MAX_CTAS is {number}, not 1 or more; it is ignored");
            }
            positive
        };
        Overrides {
            blocking: settings::number("NCCL_COMM_BLOCKING").and_then(|number| match number {
                0 => Some(false),
                1 => Some(true),
                _ => {
                    log::warn!("NCCL_COMM_BLOCKING is {number}, not 0 or 1; it is ignored");
                    None
                }
            }),
            max_ctas: settings::number("NCCL_MAX_CTAS").and_then(positive),
        }
    }
}

/// The client's config as this library's struct: as much of it as both know, the rest unset.
///
/// # Safety
/// `config` points to as many readable bytes as its first field says.
unsafe fn copied(config: *const ncclConfig_t) -> Result<ncclConfig_t> {
    // SAFETY: a size is there.
    let theirs = unsafe { config.cast::<usize>().read_unaligned() };
    if !(SMALLEST..=LARGEST).contains(&theirs) {
        fail!(
            InvalidArgument,
            "config->size is {theirs}: initialise the config with NCCL_CONFIG_INITIALIZER"
        );
    }
    let mut given = MaybeUninit::new(UNSET_CONFIG);
    let common = theirs.min(size_of::<ncclConfig_t>());
    // SAFETY: source and destination hold at least the smaller of the two sizes, and the copy is ours alone.
    // Its fields are integers and pointers, for which any bytes are valid.
    let mut given = unsafe {
        std::ptr::copy_nonoverlapping(config.cast::<u8>(), given.as_mut_ptr().cast::<u8>(), common);
        given.assume_init()
    };
    if given.magic != MAGIC {
        fail!(
            InvalidArgument,
            "config->magic is {:#x}, not {MAGIC:#x}: initialise the config with NCCL_CONFIG_INITIALIZER",
            given.magic
        );
    }
    // What a client's header did not have yet is padding, if it is there at all.
    if let Some(&(known, _)) = FIELDS.iter().find(|(_, since)| *since > given.version) {
        let bytes = (&raw mut given).cast::<u8>();
        let unset = UNSET_CONFIG;
        let unset = (&raw const unset).cast::<u8>();
        // SAFETY: both are whole structs, and `known` is an offset within them.
        unsafe {
            std::ptr::copy_nonoverlapping(
                unset.add(known),
                bytes.add(known),
                size_of::<ncclConfig_t>() - known,
            );
        }
    }
    Ok(given)
}

/// A field's value, if it is set.
fn in_range(name: &str, value: c_int, least: c_int, most: c_int) -> Result<Option<c_int>> {
    match value {
        UNSET => Ok(None),
        value if (least..=most).contains(&value) => {
            log::info!("Comm config {} set to {value}", words(name));
            Ok(Some(value))
        }
        _ if most == c_int::MAX => {
            fail!(InvalidArgument, "config->{name} is {value}; it is {least} or more, or left unset")
        }
        _ => fail!(InvalidArgument, "config->{name} is {value}; it is {least} to {most}, or left unset"),
    }
}

/// What NCCL's log calls a field, which programs look for there.
fn words(name: &str) -> &str {
    match name {
        "blocking" => "Blocking",
        "cgaClusterSize" => "CGA cluster size",
        "minCTAs" => "Min CTAs",
        "maxCTAs" => "Max CTAs",
        "splitShare" => "Split share",
        "trafficClass" => "Traffic class",
        "shrinkShare" => "Shrink share",
        "nvlsCTAs" => "NVLS CTAs",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: Config = Config { blocking: true, max_ctas: Some(16), name: None };

    /// A config as a client compiled it: `size` bytes that end a page of rubbish, of NCCL `version`.
    fn client(size: usize, version: c_uint, fill: impl FnOnce(&mut ncclConfig_t)) -> Vec<u64> {
        let mut config = ncclConfig_t { size, version, ..UNSET_CONFIG };
        fill(&mut config);
        let mut memory = vec![0x5555_5555_5555_5555u64; size.div_ceil(8)];
        // SAFETY: both hold the smaller of the two sizes.
        unsafe {
            let from = (&raw const config).cast::<u8>();
            std::ptr::copy_nonoverlapping(from, memory.as_mut_ptr().cast(), size.min(size_of_val(&config)));
        }
        memory
    }

    fn parse(memory: &[u64]) -> Result<Config> {
        // SAFETY: the memory has as many bytes as its size says.
        unsafe { Config::parse(memory.as_ptr().cast(), &PARENT) }
    }

    /// Sizes of the struct by version, with what follows each in memory being rubbish.
    #[test]
    fn configs_of_all_versions_are_understood() {
        let versions = [
            (24, 21400),
            (48, 21805),
            (48, 22602),
            (72, 22703),
            (80, 22809),
            (88, 22902),
            (96, 23004),
            (112, 23100),
            (120, 23203),
        ];
        for (size, version) in versions {
            let config = parse(&client(size, version, |config| config.blocking = 0)).unwrap();
            assert_eq!(config, Config { blocking: false, ..Config::unset() }, "{size} bytes of {version}");
        }
    }

    #[test]
    fn fields_that_a_version_did_not_have_are_padding() {
        // 2.18 ends with splitShare and four bytes of padding, where 2.26 has trafficClass.
        // SAFETY: the memory has as many bytes as its size says.
        let class =
            |memory: &[u64]| unsafe { copied(memory.as_ptr().cast()) }.map(|config| config.trafficClass);
        assert_eq!(class(&client(48, 21805, |config| config.trafficClass = -7)), Ok(UNSET));
        assert_eq!(class(&client(48, 22602, |config| config.trafficClass = -7)), Ok(-7));
    }

    #[test]
    fn what_is_wrong_is_named() {
        type Fill = fn(&mut ncclConfig_t);
        let wrong: [(Fill, &str); 7] = [
            (|config| config.magic = 0, "NCCL_CONFIG_INITIALIZER"),
            (|config| config.size = 3, "config->size is 3"),
            (|config| config.size = 1 << 40, "config->size is"),
            (|config| config.blocking = 2, "config->blocking is 2"),
            (|config| config.cgaClusterSize = -1, "cgaClusterSize is -1; it is 0 or more"),
            (|config| config.maxCTAs = 0, "maxCTAs is 0"),
            (|config| (config.minCTAs, config.maxCTAs) = (8, 4), "minCTAs is 8"),
        ];
        for (fill, part) in wrong {
            let error = parse(&client(80, 22809, fill)).unwrap_err();
            assert!(error.text().contains(part), "{error}");
        }
    }

    #[test]
    fn what_the_user_says_goes_before_what_the_program_says() {
        let user = Overrides { blocking: Some(true), max_ctas: Some(4) };
        let program = Config { blocking: false, max_ctas: Some(16), name: Some("stage".into()) };
        let both = Config { blocking: true, max_ctas: Some(4), ..program.clone() };
        assert_eq!(program.clone().overridden(&user), both);
        assert_eq!(program.clone().overridden(&Overrides::default()), program);
    }

    #[test]
    fn without_a_config_a_child_is_as_its_parent_and_with_one_as_that_says() {
        let config = parse(&client(80, 22809, |config| config.commName = c"stage".as_ptr())).unwrap();
        assert_eq!(config, Config { name: Some("stage".into()), ..Config::unset() });
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { Config::parse(std::ptr::null(), &PARENT) }, Ok(PARENT));
    }
}
