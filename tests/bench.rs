//! `unisono-bench` as its users meet it: real ranks, both transports, its table and its file.

#[path = "support/not_run.rs"]
mod not_run;
#[path = "support/unshared.rs"]
mod unshared;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use not_run::not_run;
use serde_json::Value;
use unshared::{refused, unshared};

/// A folder for one test, gone when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("unisono-bench-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the folder for temporary files can be written to");
        Folder(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("names here are text").to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_unisono-bench"));
    command.args(arguments).env_remove("UNISONO_RANK");
    command.output().expect("the benchmark can be run")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs with `--json` and gives the parsed file and the table.
fn measured(name: &str, arguments: &[&str]) -> (Value, String) {
    let folder = Folder::new(name);
    let file = folder.file("out.json");
    let output = bench(&[arguments, &["--json", &file]].concat());
    let complaint = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{complaint}");
    let json = std::fs::read_to_string(&file).expect("the file was written");
    (serde_json::from_str(&json).expect("it is JSON"), text(&output.stdout))
}

fn results(json: &Value) -> &Vec<Value> {
    json["results"].as_array().expect("there is a list of results")
}

#[test]
fn sparse_tensors_are_summed_on_host_memory() {
    let arguments = "sparse_allreduce --ranks 3 --sizes 20K,600K -d float32,bfloat16 -t shm,tcp -n 2 -w 1";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let (json, _) = measured("sparse", &arguments);
    let results = results(&json);
    // One for each size, type and transport; all are checked.
    assert_eq!(results.len(), 8);
    assert!(results.iter().all(|result| result["errors"] == 0), "{json}");
}

#[test]
fn every_operation_over_both_transports_is_right() {
    let arguments = [
        "all",
        "--ranks",
        "2",
        "--sizes",
        "0,4,3000,100K",
        "-d",
        "float32,bfloat16,int8",
        "-r",
        "0,1",
        "-t",
        "shm,tcp",
        "--calls",
        "blocking,work",
        "--places",
        "in,out",
        "-n",
        "2",
        "-w",
        "1",
    ];
    let (json, table) = measured("all", &arguments);
    let results = results(&json);
    for operation in [
        "allreduce",
        "reduce",
        "broadcast",
        "allgather",
        "gather",
        "scatter",
        "reduce_scatter",
        "alltoall",
        "barrier",
        "sendrecv",
    ] {
        for transport in ["shm", "tcp"] {
            let found = results
                .iter()
                .filter(|result| result["operation"] == operation && result["transport"] == transport);
            assert!(found.count() >= 2, "{operation} over {transport}");
        }
    }
    for result in results {
        assert_eq!(result["errors"], 0, "{result}");
        let time = |name: &str| result[name].as_f64().expect("it is a number");
        assert!(time("min_us") <= time("p50_us") && time("p50_us") <= time("p99_us"), "{result}");
    }
    assert_eq!(table.lines().filter(|line| !line.starts_with('#')).count(), 1 + results.len());
}

#[test]
fn operators_and_algorithms_are_checked_on_three_ranks() {
    let arguments = [
        "allreduce",
        "reduce_scatter",
        "--ranks",
        "3",
        "--sizes",
        "1000",
        "-d",
        "float8e4m3,float16,int32,uint64",
        "-o",
        "sum,product,min,max,average,premulsum,and,or,xor",
        "-a",
        "auto,ring,halving-doubling",
        "-t",
        "tcp",
        "-n",
        "1",
        "-w",
        "0",
    ];
    let (json, _) = measured("operators", &arguments);
    // Floats have no bitwise operators.
    assert_eq!(results(&json).len(), 2 * (2 * 6 + 2 * 9) * 3);
    assert!(results(&json).iter().all(|result| result["errors"] == 0));
    let sum = &results(&json)[0];
    let bandwidth = |name: &str| sum[name].as_f64().expect("it is a number");
    let factor = bandwidth("bus_bandwidth_gb_s") / bandwidth("algorithm_bandwidth_gb_s");
    assert!((factor - 4.0 / 3.0).abs() < 1e-9, "{factor}");
}

#[test]
fn peers_are_run_once_per_round_and_compared() {
    let folder = Folder::new("peer");
    let runs = folder.file("runs");
    let peer = format!(
        "stub=echo ${{UNISONO_RANK-none}} >> {runs}; echo allreduce 64 1e9 2e9; echo barrier 0 0.001 0.001"
    );
    let arguments = [
        "allreduce",
        "barrier",
        "--ranks",
        "2",
        "--sizes",
        "64,128",
        "-n",
        "3",
        "--rounds",
        "2",
        "--barrier",
        "--peer",
        &peer,
    ];
    let (json, table) = measured("peers", &arguments);
    assert_eq!(std::fs::read_to_string(&runs).expect("the peer ran"), "none\nnone\n");
    let peers: Vec<_> = results(&json).iter().map(|result| &result["peers"]["stub"]).collect();
    assert_eq!(peers[0]["p50_us"], 1e9);
    assert_eq!(peers[0]["p50_us_of_rounds"].as_array().map(Vec::len), Some(2));
    assert!(peers[0]["ratio"].as_f64() > Some(1.0), "{table}");
    assert!(peers[1].is_null(), "it has no 128 bytes");
    assert!(peers[2]["ratio"].as_f64() < Some(1.0), "{table}");
    assert_eq!(results(&json)[0]["iterations"], 6);
    assert!(table.lines().any(|line| line.ends_with("-       -")), "{table}");
}

#[test]
fn a_peer_stands_beside_no_case_that_it_may_not_have_measured() {
    let peer = "stub=echo allreduce 64 1 2; echo broadcast 64 1 2; echo barrier 0 1 2";
    for (several, compared) in [
        (["-d", "float32,int32"], ["barrier"].as_slice()),
        (["-o", "sum,max"], &["broadcast", "barrier"]),
        (["-r", "0,1"], &["allreduce", "barrier"]),
        // These are other ways to do the same.
        (["-t", "shm,tcp"], &["allreduce", "broadcast", "barrier"]),
    ] {
        let operations = ["allreduce", "broadcast", "barrier", "--ranks", "2", "--sizes", "64", "-n", "1"];
        let (json, table) = measured("several", &[&operations[..], &several, &["--peer", peer]].concat());
        for result in results(&json) {
            let expected = compared.iter().any(|operation| result["operation"] == *operation);
            assert_eq!(result["peers"]["stub"].is_object(), expected, "{several:?}: {result}, {table}");
        }
    }
}

#[test]
fn a_peer_is_not_told_what_the_ranks_were() {
    let folder = Folder::new("told");
    let file = folder.file("told");
    let peer = format!(
        "stub=echo ${{UNISONO_HOST-none}} ${{NCCL_HOSTID-none}} ${{CUDA_DEVICE_MAX_CONNECTIONS-none}} >{file}"
    );
    for (queues, hosts, told) in [
        (None, true, "none none none\n"),
        (Some("32"), true, "none none 32\n"),
        (None, false, "mine none none\n"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_unisono-bench"));
        command.args(["--ranks", "2", "-t", "tcp", "--sizes", "8", "-n", "1", "--peer", &peer]);
        command.args(hosts.then_some(["--hosts", "2"]).into_iter().flatten());
        command
            .env_remove("UNISONO_RANK")
            .env_remove("NCCL_HOSTID")
            .env_remove("CUDA_DEVICE_MAX_CONNECTIONS");
        command.env_remove("UNISONO_RUN_QUEUES");
        command
            .env("UNISONO_HOST", "mine")
            .envs(queues.map(|queues| ("CUDA_DEVICE_MAX_CONNECTIONS", queues)));
        let output = command.output().expect("the benchmark can be run");
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(std::fs::read_to_string(&file).expect("the peer ran"), told);
    }
}

#[test]
fn a_peer_that_fails_ends_the_run_with_its_name() {
    let arguments = ["--ranks", "2", "--sizes", "8", "-n", "1", "--peer", "broken=exit 7"];
    let output = bench(&arguments);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("peer 'broken' failed"), "{}", text(&output.stderr));
}

#[test]
fn a_peer_ends_with_the_benchmark_that_runs_it() {
    for ranks in [&["--ranks", "1", "--threads"][..], &["--ranks", "2"]] {
        let folder = Folder::new(&format!("killed-{}", ranks.len()));
        let started = folder.file("started");
        let peer = format!("sleeper=sleep 1000 & echo $! >{started}.part; mv {started}.part {started}; wait");
        let mut killed = Command::new(env!("CARGO_BIN_EXE_unisono-bench"))
            .args(ranks)
            .args(["--sizes", "8", "-n", "1", "--peer", &peer])
            .env_remove("UNISONO_RANK")
            .stdout(Stdio::null())
            .spawn()
            .expect("the benchmark can be run");
        let pid = wait_until("the peer runs", || std::fs::read_to_string(&started).ok());
        killed.kill().expect("it runs");
        killed.wait().expect("it is a child");
        let stat = format!("/proc/{}/stat", pid.trim());
        wait_until("the peer has ended", || match std::fs::read_to_string(&stat) {
            // What nobody waits for is there, but runs no more.
            Ok(stat) => stat.contains(") Z ").then_some(()),
            Err(_) => Some(()),
        });
    }
}

/// What `look` finds at last.
fn wait_until<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        match look() {
            Some(found) => return found,
            None => assert!(start.elapsed() < Duration::from_secs(60), "not within a minute: {what}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn threads_that_help_bound_ranks_are_not_bound() {
    let folder = Folder::new("bound");
    let (masks, own) = (folder.file("masks"), folder.file("own"));
    // Which processors the helpers of this process may have, and those that it began with.
    let peer = format!(
        "looks=grep -h Cpus_allowed_list /proc/$PPID/status >{own}; \
         for task in /proc/$PPID/task/*; do \
         [ \"$(cat $task/comm)\" != unisono-helper ] || grep -h Cpus_allowed_list $task/status; done >{masks}"
    );
    let output = Command::new(env!("CARGO_BIN_EXE_unisono-bench"))
        .args(["allreduce", "--ranks", "2", "--threads", "--bind", "-t", "tcp", "--sizes", "8,4M", "-n", "3"])
        .args(["--peer", &peer])
        .env_remove("UNISONO_RANK")
        .env("UNISONO_TCP_THREADS", "3")
        .output()
        .expect("the benchmark can be run");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let read = |file: &str| std::fs::read_to_string(file).expect("the peer wrote it");
    let (masks, own) = (read(&masks), read(&own));
    // Two for each rank.
    assert_eq!(masks, own.repeat(4));
}

#[test]
fn the_command_line_is_held_to_what_exists() {
    let told = |arguments: &[&str]| {
        let output = bench(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        text(&output.stderr)
    };
    assert!(told(&["--ranks", "2", "-d", "float33"]).contains("bfloat16"));
    assert!(told(&["--ranks", "2", "barrier", "-a", "bruck"]).contains("nothing to measure"));
    assert!(told(&["--ranks", "2", "broadcast", "-r", "2", "--sizes", "8"]).contains("root 2"));
    assert!(told(&[]).contains("--ranks"));
    assert!(told(&["--ranks", "2", "-a", "typo"]).contains("auto, "));
}

#[test]
fn schedules_are_proved_on_demand() {
    let output = bench(&["--check-schedules", "--ranks", "5"]);
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{table}");
    for line in ["allreduce      halving-doubling ", "barrier        dissemination ", "alltoall       bruck "]
    {
        assert!(
            table.lines().any(|given| given.starts_with(line) && given.ends_with("proved")),
            "{line}: {table}"
        );
    }
}

#[test]
fn ranks_that_are_told_to_be_on_two_hosts_are_right() {
    // Two ranks to a host: what `unisono-run` starts says which host it takes itself for.
    let script = r#"UNISONO_HOST=host$((UNISONO_RANK / 2)) exec "$0" "$@""#;
    let output = Command::new(env!("CARGO_BIN_EXE_unisono-run"))
        .args(["-n", "4", "--no-prefix", "--timeout", "60", "--", "sh", "-c", script])
        .arg(env!("CARGO_BIN_EXE_unisono-bench"))
        .args([
            "allreduce",
            "broadcast",
            "--sizes",
            "4,3000,1M",
            "-t",
            "tcp",
            "-a",
            "auto,hierarchical",
            "-n",
            "3",
            "-w",
            "1",
        ])
        .output()
        .expect("the launcher can be run");
    let (table, complaint) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{complaint}");
    let rows = table.lines().filter(|line| line.contains("float32")).count();
    assert_eq!(rows, 2 * 3 * 2, "{table}");
}

#[test]
fn ranks_may_be_threads() {
    let (json, _) = measured(
        "threads",
        &["allreduce", "broadcast", "--ranks", "3", "--threads", "--sizes", "8,64K", "-n", "3"],
    );
    assert_eq!((results(&json).len(), &json["ranks"]), (4, &Value::from(3)));
    assert!(results(&json).iter().all(|result| result["errors"] == 0));
}

#[test]
fn the_start_of_ranks_is_measured() {
    let (json, table) = measured("start", &["start", "--ranks", "2", "-t", "shm,tcp", "-n", "3"]);
    let times: Vec<_> =
        results(&json).iter().map(|result| (&result["first_us"], &result["again_p50_us"])).collect();
    assert!(times.iter().all(|(_, again)| again.as_f64() > Some(0.0)), "{table}");
    // Only once are ranks new.
    assert!(times[0].0.as_f64() > Some(0.0) && times[1].0.is_null(), "{table}");
}

#[test]
fn reduction_loops_are_measured_by_type_size_and_operands() {
    let arguments =
        ["reduce-loops", "-d", "float32,bfloat16", "-o", "sum,xor", "--sizes", "64K", "--budget", "0.01"];
    let (json, table) = measured("loops", &arguments);
    // Floats have no xor.
    assert_eq!(results(&json).len(), 2 * 2, "{table}");
    assert!(results(&json).iter().all(|result| result["gb_s"].as_f64() > Some(0.0)), "{table}");
}

#[test]
fn links_between_ranks_are_measured_without_a_gpu() {
    let arguments = ["links", "--ranks", "2", "--sizes", "100K", "--budget", "0.01", "--pointers", "1"];
    let (json, table) = measured("links", &arguments);
    let of_ranks = |what: &str| {
        let line =
            results(&json).iter().find(|result| result["what"] == what).unwrap_or_else(|| panic!("{table}"));
        (line["of"].as_u64(), line["gb_s"].as_f64() > Some(0.0))
    };
    for what in ["ranks-tcp-ring", "ranks-tcp-memory", "ranks-copy-own"] {
        assert_eq!(of_ranks(what), (Some(2), true), "{table}");
    }
}

/// Without Python this says so, and draws nothing.
#[test]
fn what_was_measured_is_drawn() {
    let folder = Folder::new("drawn");
    let (json, picture) = (folder.file("out.json"), folder.file("out.svg"));
    let peer = "other=echo allreduce 1024 10 20; echo allreduce 65536 40 50";
    let output = bench(&["--ranks", "2", "--sizes", "1K,64K", "-n", "5", "--peer", peer, "--json", &json]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/bench-svg.py");
    let draw =
        |more: &[&str]| Command::new("python3").arg(script).args(more).args([&picture, &json]).output();
    let drawn = match draw(&["--call", "blocking", "--unit", "ranks", "--names", "other=Another <one>"]) {
        Ok(drawn) => drawn,
        Err(error) => return not_run("scripts/bench-svg.py", format_args!("python3: {error}")),
    };
    assert!(drawn.status.success(), "{}", text(&drawn.stderr));
    let read = |file: &str| std::fs::read_to_string(file).expect("it was written");
    let svg = read(&picture);
    // Two curves of times, one of ratios.
    assert_eq!(svg.matches("<polyline").count(), 3, "{svg}");
    assert!(svg.contains(">Another &lt;one&gt;<") && svg.contains(">allreduce, 2 ranks<"), "{svg}");
    let refused = draw(&["--call", "graph"]).expect("python3 was there");
    assert!(text(&refused.stderr).contains("has no allreduce called by graph"), "{}", text(&refused.stderr));

    // One name and size twice; ratios beyond the panel; and what has nothing to draw.
    let mut content: Value = serde_json::from_str(&read(&json)).expect("JSON");
    let rows = content["results"].as_array_mut().expect("a list");
    rows.iter_mut().for_each(|row| row["p50_us"] = 1.0.into());
    let in_place: Vec<Value> = rows
        .iter()
        .cloned()
        .map(|mut row| {
            row["place"] = "in".into();
            row
        })
        .collect();
    rows.extend(in_place);
    let rewrite = |content: &Value| std::fs::write(&json, content.to_string()).expect("it is written");
    let complaint = |more: &[&str]| {
        let refused = draw(&[&["--call", "blocking"], more].concat()).expect("python3 was there");
        let complaint = text(&refused.stderr);
        assert_eq!((refused.status.code(), complaint.lines().count()), (Some(1), 1), "{complaint}");
        complaint
    };
    rewrite(&content);
    let told = complaint(&[]);
    assert!(told.contains("unisono (shm) twice for 1024 bytes: place out and in"), "{told}");
    let drawn = draw(&["--call", "blocking", "--only", "place=in"]).expect("python3 was there");
    assert!(drawn.status.success(), "{}", text(&drawn.stderr));
    let svg = read(&picture);
    assert!(svg.contains("↑10.0×") && svg.contains("↑40.0×"), "{svg}");
    assert!(complaint(&["--only", "size=8"]).contains("--only knows no size"));
    rewrite(&serde_json::json!({ "task": "links", "results": [{ "what": "ranks-copy", "bytes": 8 }] }));
    assert!(complaint(&[]).contains("cannot be drawn"));
}

#[test]
fn without_a_driver_device_memory_is_one_clear_line() {
    // Of no use where there is a driver: then it would measure.
    let output = bench(&["--device", "--ranks", "2", "--sizes", "8", "-n", "1"]);
    if output.status.code() == Some(0) {
        return;
    }
    let complaint = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{complaint}");
    assert!(
        complaint.contains("no CUDA driver could be loaded") || complaint.contains("cuInit failed"),
        "{complaint}"
    );
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
    for task in ["links", "local-broadcast", "local-reduce"] {
        assert_eq!(text(&bench(&[task]).stderr), complaint, "{task}");
    }
}

#[test]
fn what_makes_no_sense_together_is_refused() {
    let told = |arguments: &[&str]| {
        let output = bench(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        text(&output.stderr)
    };
    assert!(told(&["--ranks", "2", "--calls", "graph"]).contains("--device"));
    assert!(told(&["allreduce", "links"]).contains("links is measured alone"));
    assert!(told(&["reduce-loops", "--ranks", "2"]).contains("reduce-loops has no ranks"));
    assert!(told(&["--threads"]).contains("--ranks"));
    assert!(told(&["allreduce", "--tune", "file"]).contains("cannot be used with"));
    for other in [&["--bits"][..], &["--tune", "file"], &["--check-schedules"]] {
        assert!(told(&[&["--json", "file"], other].concat()).contains("cannot be used with"), "{other:?}");
    }
    // Whether there is a device or not.
    let device = ["--device", "--ranks", "2"];
    assert!(told(&[&device[..], &["--bind"]].concat()).contains("--bind is for host memory"));
    assert!(told(&["--library", "native", "--bind", "--ranks", "2"]).contains("taskset"));
    for calls in ["stream", "blocking,graph"] {
        let told = told(&[&device[..], &["--barrier", "--calls", calls]].concat());
        assert!(told.contains("--barrier is for calls that wait"), "{calls}: {told}");
    }
    assert!(told(&[&device[..], &["--barrier"]].concat()).contains("--calls blocking"));
    let (peer, rounds) = (&["--peer", "x=true"][..], &["--rounds", "2"][..]);
    for what in
        ["start --ranks 2", "links --ranks 2", "reduce-loops", "local-reduce", "--bits", "--tune file"]
    {
        let words: Vec<&str> = what.split(' ').collect();
        for option in [peer, rounds] {
            let told = told(&[&words[..], option].concat());
            assert!(told.contains(&format!("{} is for collectives", option[0])), "{what}: {told}");
        }
    }
    for (option, value) in [("--pointers", "2"), ("--pdl", "wait"), ("--max-blocks", "8"), ("--offset", "4")]
    {
        for what in [&["--ranks", "2"][..], &["start", "--ranks", "2"], &["reduce-loops"]] {
            let told = told(&[what, &[option, value]].concat());
            assert!(told.contains(&format!("{option} is for device memory")), "{what:?}: {told}");
        }
        if option != "--pointers" {
            assert!(told(&["links", option, value]).contains("is for device memory"), "{option}");
        }
    }
    let sparse = ["sparse_allreduce", "--ranks", "2", "-o", "sum,max"];
    assert!(told(&sparse).contains("sparse_allreduce only sums"));
    let named = "two of --library and --peer are called 'x': give each a name of its own, NAME=...";
    for (one, other) in [("--library", "--library"), ("--library", "--peer"), ("--peer", "--peer")] {
        assert!(told(&["--ranks", "2", one, "x=/a", other, "x=/b"]).contains(named), "{one} {other}");
    }
}

/// Settings are the library's: it is enough that this program has a context.
#[test]
fn settings_that_are_no_text_are_not_taken_for_unset() {
    let with = |name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_unisono-bench"));
        command.args("allreduce --ranks 2 --threads -t auto --sizes 8 -n 1 -w 0".split(' '));
        command.env_remove("UNISONO_RANK").env(name, OsStr::from_bytes(b"\xff1"));
        let output = command.output().expect("the benchmark can be run");
        (output.status.code(), text(&output.stderr))
    };
    for name in [
        "UNISONO_TRANSPORT",
        "UNISONO_CMA",
        "UNISONO_TCP_STREAMS",
        "UNISONO_TCP_THREADS",
        "UNISONO_RELAY",
        "UNISONO_INTERFACE",
        "UNISONO_HOST",
    ] {
        let (code, complaint) = with(name);
        assert!(code == Some(2) && complaint.contains(name), "{name}: {complaint}");
    }
    // Nothing can fail by how much is logged: the log says so.
    let (code, log) = with("UNISONO_LOG");
    assert!(code == Some(0) && log.contains("use off, error, warn"), "{log}");
}

#[test]
fn a_file_that_cannot_be_written_is_told_before_anything_is_measured() {
    let folder = Folder::new("nowhere");
    let (nowhere, there) = (folder.file("none/out.json"), folder.file("out.json"));
    for what in ["allreduce --ranks 2", "allreduce --ranks 2 --threads", "reduce-loops"] {
        let words = what.split(' ');
        let output = bench(
            &words.chain(["--sizes", "64K", "--budget", "0.01", "--json", &nowhere]).collect::<Vec<_>>(),
        );
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), String::new()), "{what}");
        assert!(text(&output.stderr).contains("cannot write"), "{what}: {}", text(&output.stderr));
    }
    // What fails later leaves the file as it was.
    std::fs::write(&there, "before").expect("the folder can be written to");
    let output = bench(&["--ranks", "2", "--sizes", "8", "-n", "1", "--peer", "x=exit 7", "--json", &there]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(std::fs::read_to_string(&there).expect("it is there"), "before");
    assert_eq!(std::fs::read_dir(&folder.0).expect("it is there").count(), 1);
}

#[test]
fn a_reader_that_stops_ends_it_quietly() {
    for what in ["allreduce --ranks 2", "allreduce --ranks 2 --threads", "reduce-loops"] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_unisono-bench"))
            .args(what.split(' '))
            // Seconds of it: there is more to say when the reader has gone.
            .args(["--sizes", "8,16,32,64,128,256,512,1K", "--budget", "0.5"])
            .env_remove("UNISONO_RANK")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the benchmark can be run");
        let mut line = String::new();
        let mut reader = BufReader::new(child.stdout.take().expect("it is piped"));
        reader.read_line(&mut line).expect("it is text");
        drop(reader);
        let output = child.wait_with_output().expect("it is a child");
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(141), String::new()), "{what}");
        assert!(line.starts_with("# "), "{what}: {line}");
    }
}

#[test]
fn what_has_no_ranks_is_not_measured_by_each_of_them() {
    let output = Command::new(env!("CARGO_BIN_EXE_unisono-run"))
        .args(["-n", "2", "--no-prefix", "--timeout", "60", "--", env!("CARGO_BIN_EXE_unisono-bench")])
        .args(["reduce-loops", "--sizes", "64K", "--budget", "0.01"])
        .output()
        .expect("the launcher can be run");
    let (table, complaint) = (text(&output.stdout), text(&output.stderr));
    assert!(!output.status.success() && table.is_empty(), "{table}");
    assert!(complaint.contains("reduce-loops has no ranks; start it alone, by no launcher"), "{complaint}");
}

#[test]
fn ranks_of_a_host_without_any_network_meet_in_a_directory() {
    if let Some(why) = refused() {
        return not_run("ranks_of_a_host_without_any_network_meet_in_a_directory", why);
    }
    let folder = Folder::new("no-network");
    let both = "UNISONO_RANK=1 \"$@\" & UNISONO_RANK=0 \"$@\"; first=$?; wait $! && exit $first";
    let output = unshared()
        .args(["sh", "-c", both, "sh", env!("CARGO_BIN_EXE_unisono-bench"), "allreduce"])
        .args(["-t", "auto", "--sizes", "8,100K", "-n", "2", "-w", "1"])
        .env("UNISONO_SIZE", "2")
        .env("UNISONO_STORE", format!("file:{}", folder.file("store")))
        .env_remove("UNISONO_INTERFACE")
        .env_remove("UNISONO_TRANSPORT")
        .output()
        .expect("the ranks can be run");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn who_finds_a_stranger_at_the_port_of_the_store_says_so_while_it_waits() {
    let stranger = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
    let place = stranger.local_addr().expect("it has a port").to_string();
    let mut rank = Command::new(env!("CARGO_BIN_EXE_unisono-bench"))
        .args(["barrier", "--timeout", "30"])
        .envs([("UNISONO_RANK", "0"), ("UNISONO_SIZE", "2"), ("UNISONO_STORE", &format!("tcp://{place}"))])
        .env("UNISONO_LOG", "warn")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the benchmark can be run");
    let lines = BufReader::new(rank.stderr.take().expect("it is piped")).lines();
    let told = lines.map_while(Result::ok).find(|line| line.contains("trying again until the deadline"));
    rank.kill().expect("it is there");
    rank.wait().expect("it is this process's");
    let told = told.expect("it says so");
    assert!(told.contains(&place) && told.contains("another program may use the port"), "{told}");
}
