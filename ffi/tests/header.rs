//! The committed header is what cbindgen makes of `ffi/src` today. `UPDATE_HEADERS=1` rewrites it.

use std::path::Path;

#[test]
fn the_committed_header_is_up_to_date() {
    let root = &Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is read");
    let mut builder = cbindgen::Builder::new().with_config(config);
    let mut sources: Vec<_> = std::fs::read_dir(root.join("ffi/src"))
        .expect("ffi/src is a directory")
        .map(|entry| entry.expect("an entry of ffi/src").path())
        .filter(|path| path.file_name() != Some("lib.rs".as_ref()))
        .collect();
    // In the order in which a reader needs them; a noun that this list does not know comes last.
    let order = [
        "version",
        "argument",
        "status",
        "datatype",
        "log",
        "store",
        "callback_store",
        "unique_id",
        "context",
        "work",
        "call",
        "collective",
        "point_to_point",
        "buffer",
        "sparse",
        "algorithm",
    ];
    sources.sort_by_key(|path| {
        let noun = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
        (order.iter().position(|&known| known == noun).unwrap_or(order.len()), noun)
    });
    for source in sources {
        builder = builder.with_src(source);
    }
    let mut generated = Vec::new();
    builder.generate().expect("cbindgen understands ffi/src").write(&mut generated);
    let generated = String::from_utf8(generated).expect("cbindgen writes UTF-8");

    let mut declared: Vec<&str> = generated
        .lines()
        .filter(|line| !line.starts_with([' ', '/', '#']))
        .filter_map(|line| line.split_once('('))
        .filter_map(|(before, _)| before.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("unisono_"))
        .collect();
    declared.sort_unstable();
    let exports =
        std::fs::read_to_string(root.join("c_tests/exports/libunisono.txt")).expect("the list of exports");
    assert_eq!(
        declared,
        exports.lines().collect::<Vec<_>>(),
        "the header and c_tests/exports/libunisono.txt differ"
    );

    // What a comment names, a caller wants to write.
    for named in generated.split("(enum ").skip(1).filter_map(|rest| rest.split([')', ',']).next()) {
        assert!(generated.contains(&format!("typedef enum {named} {{")), "enum {named} is not in the header");
    }

    let path = root.join("include/unisono.h");
    if std::env::var_os("UPDATE_HEADERS").is_some() {
        std::fs::write(&path, &generated).expect("include/unisono.h is written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let first = generated.lines().zip(committed.lines()).position(|(ours, theirs)| ours != theirs);
    assert!(
        generated == committed,
        "include/unisono.h is out of date (first difference: line {}); run: UPDATE_HEADERS=1 cargo test -p unisono-ffi --test header",
        first.map_or(generated.lines().count().min(committed.lines().count()), |line| line) + 1
    );
}
