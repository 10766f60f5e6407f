//! An unusable spool: the default one is skipped, a configured one is an error.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use headwater_testkit::Redis;
use support::{ServerDir, directory};

#[tokio::test]
async fn an_unwritable_default_spool_is_skipped() {
    let redis = Redis::start().unwrap();
    let dir = ServerDir::new().unwrap();
    // A file is in place of the directory.
    directory(&dir, "headwater-data").unwrap();
    std::fs::write(dir.file("headwater-data/spool"), "x").unwrap();
    let server = dir.serve(&["--stream-url", &redis.url()]).unwrap();
    server.wait_for_log("default spool cannot be used").unwrap();
    server.wait_for_log("no spool available").unwrap();
    server.until("/health/ready", |status, _| status == 200).await.unwrap();
    drop(server);
    let worker = dir.worker(&["--stream-url", &redis.url()]).unwrap();
    worker.until("/health/ready", |status, _| status == 200).await.unwrap();
}

#[tokio::test]
async fn a_damaged_default_spool_is_kept_and_the_next_one_is_used() {
    let redis = Redis::start().unwrap();
    let dir = ServerDir::new().unwrap();
    directory(&dir, "headwater-data/spool/0.spool").unwrap();
    let damaged = dir.file("headwater-data/spool/0.spool/00000001.log");
    std::fs::write(&damaged, "this is no spool at all, and never was one").unwrap();
    let server = dir.serve(&["--stream-url", &redis.url()]).unwrap();
    let warned = server.wait_for_log("default spool cannot be used").unwrap();
    assert!(warned["error"].as_str().unwrap().contains("0.spool"), "{warned}");
    assert!(!server.log().contains("no spool available"), "{}", server.log());
    assert!(std::fs::metadata(dir.file("headwater-data/spool/1.spool")).is_ok());
    assert!(std::fs::read_to_string(&damaged).unwrap().starts_with("this is no spool"));
}

#[test]
fn a_configured_spool_must_be_usable() {
    let redis = Redis::start().unwrap();
    for verb in ["serve", "worker"] {
        let dir = ServerDir::new().unwrap();
        std::fs::write(dir.file("mine"), "x").unwrap();
        let listen = ["--http-listen", "127.0.0.1:0"];
        let url = redis.url();
        let words = [verb, "--stream-url", &url, "--stream-spool", "mine", listen[0], listen[1]];
        let output = dir.run(&words).unwrap();
        let message = support::text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains("stream.spool"), "{message}");
    }
}
