//! NCCL's settings: what the environment says or, where it does not, NCCL's configuration files. What cannot
//! be understood is ignored, as NCCL does; what is empty says nothing, and keeps the files from being asked,
//! as there.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::LazyLock;

/// The value of one of NCCL's variables. The environment's counts first, then that of the user's file, then
/// that of the machine's.
pub(crate) fn get(name: &str) -> Option<String> {
    unisono::settings::read(name).or_else(|| FILES.get(name).cloned())
}

/// A number; what is none is ignored, and said in the log.
pub(crate) fn number(name: &str) -> Option<i64> {
    let text = get(name).filter(|text| !text.trim().is_empty())?;
    let number = text.trim().parse();
    if number.is_err() {
        log::warn!("{name} is \"{text}\", which is not a number; it is ignored");
    }
    number.ok()
}

/// What the files say, read once.
static FILES: LazyLock<HashMap<String, String>> = LazyLock::new(|| {
    let named = std::env::var_os("NCCL_CONF_FILE").filter(|path| !path.is_empty()).map(PathBuf::from);
    let user = named.or_else(|| std::env::home_dir().map(|home| home.join(".nccl.conf")));
    let mut settings = HashMap::new();
    for path in user.into_iter().chain([PathBuf::from("/etc/nccl.conf")]) {
        let Ok(bytes) = std::fs::read(&path) else { continue };
        parse(&String::from_utf8_lossy(&bytes), &mut settings);
    }
    settings
});

/// Adds what a file says, a NAME=VALUE on each line, to what was said before it, which counts more.
fn parse(text: &str, settings: &mut HashMap<String, String>) {
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some((name, value)) = line.split_once('=') {
            settings.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_first_counts() {
        let mut settings = HashMap::new();
        parse("# NCCL_DEBUG=INFO\nNCCL_DEBUG=WARN\r\nno setting\nNCCL_SOCKET_IFNAME==eth0\n", &mut settings);
        parse("NCCL_DEBUG=TRACE\nNCCL_NET=Socket", &mut settings);
        let said = |name: &str| settings.get(name).map(String::as_str);
        assert_eq!(said("NCCL_DEBUG"), Some("WARN"));
        assert_eq!(said("NCCL_SOCKET_IFNAME"), Some("=eth0"));
        assert_eq!(said("NCCL_NET"), Some("Socket"));
        assert_eq!(settings.len(), 3);
    }
}
