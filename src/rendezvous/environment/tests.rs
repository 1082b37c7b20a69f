//! What each launcher's variables come to.

use super::*;

fn read(variables: &[(&str, &str)]) -> Result<Launch> {
    Launch::from_lookup(|name| {
        variables.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    })
}

#[test]
fn a_value_that_is_no_text_is_refused_and_not_taken_for_none() {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;
    let read = |name: &str, value: &[u8]| {
        let odd = OsString::from_vec(value.to_owned());
        Launch::from_os_lookup(|asked| match BY_HAND.iter().find(|(known, _)| *known == asked) {
            Some((_, value)) => Some(value.into()),
            None => (asked == name).then(|| odd.clone()),
        })
    };
    for (name, value) in
        [("UNISONO_SECRET", &b"sixteen bytes and \xff"[..]), ("UNISONO_STORE", b"file:/caf\xe9")]
    {
        let error = read(name, value).unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument);
        assert!(error.text().contains(name) && error.text().contains("UTF-8"), "{error}");
    }
    // What nobody asks for may be anything.
    assert!(read("PATH", b"\xff").is_ok());
}

#[track_caller]
fn expect(variables: &[(&str, &str)], launcher: Launcher, place: [usize; 4], store: &How) {
    let launch = read(variables).unwrap();
    assert_eq!(launch.launcher, launcher);
    assert_eq!(
        [Some(launch.rank), Some(launch.size), launch.local_rank, launch.local_size],
        place.map(Some),
        "rank, size, local rank, local size"
    );
    assert_eq!(launch.store, *store);
}

fn rank0(host: &str, port: u16) -> How {
    How::Rank0 { host: host.to_owned(), port }
}

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
];
const OPEN_MPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("PMIX_NAMESPACE", "prterun-h-77@1"),
];
const MPICH: &[(&str, &str)] = &[
    ("PMI_RANK", "2"),
    ("PMI_SIZE", "3"),
    ("PMI_ID", "2"),
    ("MPI_LOCALRANKID", "2"),
    ("MPI_LOCALNRANKS", "3"),
];
const SLURM: &[(&str, &str)] = &[
    ("SLURM_PROCID", "4"),
    ("SLURM_NTASKS", "5"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "2"),
    ("SLURM_JOB_ID", "1234"),
    ("SLURM_STEP_ID", "6"),
    ("SLURM_STEP_NODELIST", "node[07-09]"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
];
const BY_HAND: &[(&str, &str)] =
    &[("UNISONO_RANK", "1"), ("UNISONO_SIZE", "2"), ("UNISONO_LOCAL_RANK", "1"), ("UNISONO_LOCAL_SIZE", "2")];

fn with<'a>(base: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [base, more].concat()
}

#[test]
fn unisono_run() {
    let (id, _server) = UniqueId::create(Some("127.0.0.1")).unwrap();
    let hex = id.to_hex();
    let store = How::Id(Box::new(id));
    expect(&with(BY_HAND, &[("UNISONO_ID", &hex)]), Launcher::Unisono, [1, 2, 1, 2], &store);
    // unisono-run sets torchrun's variables too; its own go first.
    let both = with(&with(TORCHRUN, BY_HAND), &[("UNISONO_ID", &hex)]);
    expect(&both, Launcher::Unisono, [1, 2, 1, 2], &store);
    expect(BY_HAND, Launcher::Unisono, [1, 2, 1, 2], &How::Local { job: String::new() });
}

#[test]
fn torchrun() {
    expect(TORCHRUN, Launcher::Torchrun, [3, 8, 1, 2], &rank0("node0", 29502));
    expect(&with(TORCHRUN, &[("UNISONO_PORT", "7")]), Launcher::Torchrun, [3, 8, 1, 2], &rank0("node0", 7));
    for (port, ours) in [("65533", 65535), ("65534", 65532), ("65535", 65533)] {
        let last = with(TORCHRUN, &[("MASTER_PORT", port)]);
        expect(&last, Launcher::Torchrun, [3, 8, 1, 2], &rank0("node0", ours));
    }
    // torchrun under srun or mpirun.
    expect(&with(SLURM, TORCHRUN), Launcher::Torchrun, [3, 8, 1, 2], &rank0("node0", 29502));
}

#[test]
fn open_mpi() {
    let local = How::Local { job: "prterun-h-77@1".to_owned() };
    expect(OPEN_MPI, Launcher::OpenMpi, [1, 4, 1, 4], &local);
    expect(&with(SLURM, OPEN_MPI), Launcher::OpenMpi, [1, 4, 1, 4], &local);
    let hosts = with(OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]);
    let text = read(&hosts).unwrap_err().to_string();
    assert!(
        text.contains("OMPI_COMM_WORLD_LOCAL_SIZE is 2") && text.contains("UNISONO_STORE=tcp://"),
        "{text}"
    );
    let master = with(&hosts, &[("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "400")]);
    expect(&master, Launcher::OpenMpi, [1, 4, 1, 2], &rank0("10.0.0.1", 402));
}

#[test]
fn mpich() {
    expect(MPICH, Launcher::Mpich, [2, 3, 2, 3], &How::Local { job: String::new() });
    // Hydra inside a Slurm job: Slurm's variables number the proxies.
    let inside = with(SLURM, MPICH);
    expect(&inside, Launcher::Mpich, [2, 3, 2, 3], &How::Local { job: String::new() });
    let text = read(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]).unwrap_err().to_string();
    assert!(text.contains("MPI_LOCALNRANKS is not set"), "{text}");
}

#[test]
fn srun() {
    let port = 23_000 + ((1234 * 131 + 6) % 9_000) as u16;
    expect(SLURM, Launcher::Slurm, [4, 5, 0, 1], &rank0("node07", port));
    let job = with(&SLURM[..6], &[("SLURM_JOB_NODELIST", "a,b"), ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1")]);
    expect(&job, Launcher::Slurm, [4, 5, 0, 1], &rank0("a", port));
    let one_host = with(SLURM, &[("SLURM_STEP_TASKS_PER_NODE", "5"), ("SLURM_LOCALID", "4")]);
    expect(&one_host, Launcher::Slurm, [4, 5, 4, 5], &How::Local { job: "slurm-1234.6".to_owned() });
    // srun with PMI-2 sets PMI's variables as well.
    let pmi = with(SLURM, &[("PMI_RANK", "4"), ("PMI_SIZE", "5")]);
    expect(&pmi, Launcher::Slurm, [4, 5, 0, 1], &rank0("node07", port));
}

#[test]
fn an_explicit_store_goes_first() {
    let tcp = |host: &str, port| How::Tcp { host: host.to_owned(), port };
    for (text, store) in [
        ("file:/shared/job", How::File("/shared/job".into())),
        ("file:///shared/job", How::File("/shared/job".into())),
        ("tcp://node5:2950", tcp("node5", 2950)),
        ("tcp://[fd00::5]:2950/", tcp("fd00::5", 2950)),
    ] {
        assert_eq!(read(&with(OPEN_MPI, &[("UNISONO_STORE", text)])).unwrap().store, store);
        let bare = [("UNISONO_RANK", "0"), ("UNISONO_SIZE", "2"), ("UNISONO_STORE", text)];
        assert_eq!(read(&bare).unwrap().store, store);
    }
    for text in [
        "file:dir",
        "tcp://host",
        "tcp://host:0",
        "tcp://host:x",
        "tcp://:5",
        "tcp://fd00::5:1",
        "redis://x:1",
    ] {
        let error = read(&with(OPEN_MPI, &[("UNISONO_STORE", text)])).unwrap_err();
        assert!(error.text().contains(&format!("UNISONO_STORE is '{text}'")), "{error}");
    }
}

#[test]
fn one_rank_needs_no_store() {
    assert_eq!(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().store, How::Alone);
    assert_eq!(read(&[("UNISONO_RANK", "0"), ("UNISONO_SIZE", "1")]).unwrap().store, How::Alone);
}

#[test]
fn mistakes_name_the_variable_what_was_found_and_what_to_do() {
    type Variables<'a> = &'a [(&'a str, &'a str)];
    let cases: &[(Variables<'_>, Variables<'_>, &[&str])] = &[
        (&[], &[], &["no launcher", "UNISONO_RANK", "SLURM_PROCID", "torchrun"]),
        (&[], &[("RANK", "0")], &["WORLD_SIZE is not set", "torchrun"]),
        (&[], &[("WORLD_SIZE", "2")], &["RANK is not set"]),
        (&[], &[("UNISONO_RANK", "0")], &["UNISONO_SIZE is not set"]),
        (&[], &[("UNISONO_RANK", "0"), ("UNISONO_SIZE", "2")], &["UNISONO_ID is not set", "UNISONO_STORE"]),
        (TORCHRUN, &[("RANK", "eight")], &["RANK is 'eight'", "number"]),
        (TORCHRUN, &[("RANK", "-1")], &["RANK is '-1'"]),
        (TORCHRUN, &[("RANK", "8")], &["RANK is 8 and WORLD_SIZE is 8"]),
        (TORCHRUN, &[("WORLD_SIZE", "0")], &["WORLD_SIZE is 0"]),
        (TORCHRUN, &[("LOCAL_RANK", "2")], &["LOCAL_RANK is 2", "LOCAL_WORLD_SIZE says 2"]),
        (TORCHRUN, &[("LOCAL_WORLD_SIZE", "9")], &["LOCAL_WORLD_SIZE is 9", "WORLD_SIZE is 8"]),
        (TORCHRUN, &[("MASTER_ADDR", "")], &["MASTER_ADDR is not set"]),
        (TORCHRUN, &[("MASTER_PORT", "")], &["MASTER_ADDR is 'node0'", "MASTER_PORT", "UNISONO_PORT"]),
        (TORCHRUN, &[("MASTER_PORT", "70000")], &["MASTER_PORT is '70000'", "65535"]),
        (TORCHRUN, &[("UNISONO_PORT", "0")], &["UNISONO_PORT is '0'"]),
        (TORCHRUN, &[("UNISONO_SECRET", "short")], &["UNISONO_SECRET has 5 characters", "16"]),
        (BY_HAND, &[("UNISONO_ID", "12")], &["UNISONO_ID", "256 hexadecimal digits"]),
        (SLURM, &[("SLURM_STEP_ID", "")], &["SLURM_STEP_ID", "start the program with srun"]),
        (SLURM, &[("SLURM_STEP_NODELIST", "n[")], &["SLURM_STEP_NODELIST is 'n['"]),
        (SLURM, &[("SLURM_STEP_NODELIST", "")], &["SLURM_STEP_NODELIST is not set"]),
        (SLURM, &[("SLURM_STEP_TASKS_PER_NODE", "2,2")], &["4 tasks together", "SLURM_NTASKS is 5"]),
        (SLURM, &[("SLURM_STEP_TASKS_PER_NODE", "?")], &["SLURM_STEP_TASKS_PER_NODE is '?'"]),
    ];
    for (base, more, parts) in cases {
        let error = read(&with(base, more)).expect_err("a mistake");
        for part in *parts {
            assert!(error.text().contains(part), "{more:?}: {error}");
        }
        assert!(!error.text().contains("short"), "a secret is not shown: {error}");
    }
}

#[test]
fn the_secret_is_the_hash_of_its_text() {
    let text = "correct horse battery staple";
    let launch = read(&with(TORCHRUN, &[("UNISONO_SECRET", text)])).unwrap();
    assert_eq!(launch.secret, Some(SecretKey::from_text(text)));
    assert!(!format!("{launch:?}").contains("horse"));
}
