//! The committed header is what cbindgen makes of `src` today. `UPDATE_HEADERS=1` rewrites it.

use std::path::Path;

/// In the order in which a reader needs them. `device_api` is not in the header: NVIDIA's headers declare it.
const SOURCES: [&str; 15] = [
    "abi",
    "version",
    "error",
    "debug",
    "unique_id",
    "create",
    "grow",
    "end",
    "query",
    "suspend",
    "group",
    "operator",
    "collective",
    "collective_config",
    "point_to_point",
];
const LATER: [&str; 2] = ["memory", "one_sided"];

#[test]
fn the_committed_header_is_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is read");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES.iter().chain(&LATER) {
        builder = builder.with_src(root.join(format!("src/{source}.rs")));
    }
    let mut generated = Vec::new();
    builder.generate().expect("cbindgen understands src").write(&mut generated);
    let generated = String::from_utf8(generated).expect("cbindgen writes UTF-8");
    let (generated, declared) = with_second_names(&generated);

    let exports =
        std::fs::read_to_string(root.join("../c_tests/exports/libnccl.txt")).expect("the list of exports");
    let exported: Vec<&str> = exports.lines().collect();
    for name in &declared {
        assert!(exported.contains(&name.as_str()), "{name} is declared, but not exported");
    }
    // All that is not in the header is the device API, and names without a meaning of their own.
    let elsewhere =
        ["DevComm", "Team", "LLA2A", "Barrier", "DevicePointer", "QueryProperties", "DebugInitInternal"];
    for name in exported {
        let device = elsewhere.iter().any(|part| name.contains(part));
        assert_eq!(declared.iter().any(|declared| declared == name), !device, "{name}");
    }

    let path = root.join("../include/unisono/nccl.h");
    if std::env::var_os("UPDATE_HEADERS").is_some() {
        std::fs::write(&path, &generated).expect("include/unisono/nccl.h is written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let first = generated.lines().zip(committed.lines()).position(|(ours, theirs)| ours != theirs);
    assert!(
        generated == committed,
        "include/unisono/nccl.h is out of date (first difference: line {}); run: UPDATE_HEADERS=1 cargo test --package unisono-nccl --test header",
        first.map_or(generated.lines().count().min(committed.lines().count()), |line| line) + 1
    );
}

/// Declares each function a second time, by its second name. The header, and all names that it declares.
fn with_second_names(header: &str) -> (String, Vec<String>) {
    let (mut text, mut names) = (String::new(), Vec::new());
    let mut declaration = String::new();
    for line in header.lines() {
        text.push_str(line);
        text.push('\n');
        let begins = !line.starts_with([' ', '/', '#', '}', '*'])
            && line.contains('(')
            && !line.starts_with("typedef");
        if !begins && declaration.is_empty() {
            continue;
        }
        declaration.push_str(line);
        declaration.push('\n');
        if line.ends_with(");") {
            let before = declaration.split('(').next().expect("a declaration has arguments");
            let name = before.rsplit([' ', '*']).next().expect("a declaration has a name").to_owned();
            text.push_str(&declaration.replacen(&format!("{name}("), &format!("p{name}("), 1));
            names.push(format!("p{name}"));
            names.push(name);
            declaration.clear();
        }
    }
    (text, names)
}
