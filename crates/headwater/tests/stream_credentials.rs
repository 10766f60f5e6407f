//! Settings of the connection to Redis: the binary uses what a file or a command of the password contains when it connects,
//! and configures the server only if it may.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use headwater_testkit::{Redis, wait_until};
use support::{LIMIT, ServerDir, text};

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

#[test]
fn notifications_of_the_server_are_configured_only_if_the_setting_permits_it() {
    let off = "[stream]\nconfigure_notifications = false\n";
    let dir = || ServerDir::new().unwrap();
    for (dir, expected) in [
        (dir(), "Ex"),
        (dir().settings(off).unwrap(), ""),
        (dir().variable("HEADWATER_STREAM_CONFIGURE_NOTIFICATIONS", "false"), ""),
    ] {
        let redis = Redis::start().unwrap();
        let url = redis.url();
        let created = dir.run(&["topic", "create", "orders", "--stream-url", &url]).unwrap();
        assert!(created.status.success(), "{}", text(&created.stderr));
        let consume = ["consume", "orders", "--group", "billing", "--stream-url", &url];
        let consumer = dir.start_soon(&consume).unwrap();
        // It subscribes after it has configured the server, or has decided not to.
        wait_until("a subscription", LIMIT, || {
            let channels = redis.command(&["PUBSUB", "CHANNELS"]).unwrap();
            channels.items().iter().any(|channel| channel.text().ends_with(":expired"))
        })
        .unwrap_or_else(|error| panic!("{error}: {}", consumer.log()));
        let flags = redis.command(&["CONFIG", "GET", "notify-keyspace-events"]).unwrap();
        let flags = flags.items()[1].text();
        let has = |flag: char| flags.contains(flag);
        assert_eq!(flags.len(), expected.len(), "{flags}");
        assert!(expected.chars().all(has), "{flags}");
    }
}
