//! The password of Redis from a file or a command: the binary uses what they contain when it connects.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use headwater_testkit::Redis;
use support::{ServerDir, text};

#[test]
fn the_password_comes_from_a_file_or_a_command_and_is_read_again() {
    let redis = Redis::builder().user("app", "first", "~* &* +@all").start().unwrap();
    let dir = ServerDir::new().unwrap();
    let token = dir.path().join("token");
    let file = token.display().to_string();
    let (url, command) = (format!("redis://app@{}/", redis.addr()), format!("cat '{file}'"));
    for password in ["first", "second"] {
        let rule = format!(">{password}");
        redis.command(&["ACL", "SETUSER", "app", "resetpass", &rule]).unwrap().ok().unwrap();
        std::fs::write(&token, format!("{password}\n")).unwrap();
        for source in [["--stream-password-file", &file], ["--stream-password-command", &command]] {
            let list = ["topic", "list", "--stream-url", &url, source[0], source[1]];
            let output = dir.run(&list).unwrap();
            assert!(output.status.success(), "{source:?}: {}", text(&output.stderr));
        }
    }

    // A wrong password is an error that does not show it.
    std::fs::write(&token, "hunter2\n").unwrap();
    let list = ["topic", "list", "--stream-url", &url, "--stream-password-file", &file];
    let output = dir.run(&[&list[..], &["--start-wait", "0s"]].concat()).unwrap();
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{message}");
    assert!(message.contains("WRONGPASS") && !message.contains("hunter2"), "{message}");
    let both = [&list[..], &["--stream-password-command", &command]].concat();
    let message = text(&dir.run(&both).unwrap().stderr);
    assert!(message.contains("are both set"), "{message}");
}
