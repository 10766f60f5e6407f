//! Tests of the settings as a whole: precedence and error messages.

use std::path::PathBuf;

use crate::config::*;

fn loaded(given: &RawSettings) -> Result<ResolvedSettings, SettingsError> {
    load(given, SecretsPolicy::Required)
}

fn given(file: &str) -> RawSettings {
    RawSettings {
        file: Some((PathBuf::from("headwater.toml"), file.to_owned())),
        ..RawSettings::default()
    }
}

fn variable(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

fn problem(given: &RawSettings) -> String {
    loaded(given).expect_err("the settings are invalid").to_string()
}

#[test]
fn the_defaults_are_valid_and_every_setting_of_the_table_is_read() {
    let loaded = loaded(&RawSettings::default()).unwrap();
    assert_eq!(loaded.settings.http.listen.to_string(), "127.0.0.1:8080");
    assert_eq!(loaded.settings.work.quiet, Duration::from_millis(800));
    assert_eq!(loaded.settings.integrations.len(), 1, "the desk is built in");

    // A setting that is read must be in the table, or the reader panics; this checks the other direction.
    let source = include_str!("mod.rs");
    for setting in TABLE {
        let is_read = source.contains(&format!("\"{}\"", setting.name));
        assert!(is_read, "{} is in the table but is not read", setting.name);
    }
}

#[test]
fn flags_win_over_the_environment_over_the_file_over_the_default() {
    let mut given = given("[worker]\nconcurrency = 3\n");
    let concurrency = |given: &RawSettings| {
        let loaded = loaded(given).unwrap();
        let source = loaded.values.get("worker.concurrency").source.to_string();
        (loaded.settings.work.concurrency, source)
    };
    assert_eq!(concurrency(&RawSettings::default()), (64, "default".to_owned()));
    assert_eq!(concurrency(&given), (3, "headwater.toml".to_owned()));
    given.environment.push(variable("HEADWATER_WORKER_CONCURRENCY", "4"));
    assert_eq!(concurrency(&given), (4, "HEADWATER_WORKER_CONCURRENCY".to_owned()));
    given.flags.push(("worker.concurrency", "5".to_owned()));
    assert_eq!(concurrency(&given), (5, "--worker-concurrency".to_owned()));
}

#[test]
fn a_price_in_the_file_may_have_a_fraction() {
    let loaded = loaded(&given("[model]\nprice_in = 2.5\nprice_out = 10\n")).unwrap();
    let prices = loaded.settings.desk.prices;
    assert_eq!((prices.input, prices.output), (2.5, 10.0));
}

#[test]
fn an_invalid_setting_is_reported_with_value_source_and_allowed_values() {
    let error = problem(&given("[worker]\nconcurrency = 0\n"));
    for part in ["`worker.concurrency`", "`0`", "headwater.toml", "from 1 to 10000"] {
        assert!(error.contains(part), "{error}");
    }
    let mut from_environment = RawSettings::default();
    from_environment.environment.push(variable("HEADWATER_ISSUE_QUIET", "soon"));
    let error = problem(&from_environment);
    for part in ["`issue.quiet`", "`soon`", "HEADWATER_ISSUE_QUIET", "800ms"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(problem(&given("[http]\nlisten = []\n")).contains("`http.listen`"));
    assert!(problem(&given("[http\n")).contains("headwater.toml"));
    assert!(problem(&given("[issue]\nquiet = \"9s\"\n")).contains("`issue.max_wait`"));
}

#[test]
fn unknown_names_are_rejected_in_file_and_environment() {
    assert!(problem(&given("[http]\nlistne = \"a\"\n")).contains("did you mean `http.listen`?"));
    assert!(problem(&given("listen = \"a\"\n")).contains("`listen`"));
    assert!(problem(&given("[[webhook]]\nid = \"a\"\n")).contains("`webhook`"));
    assert!(problem(&given("[[token]]\nnam = \"a\"\n")).contains("nam"));
    let mut wrong = RawSettings::default();
    wrong.environment.push(variable("HEADWATER_STREAM_ULR", "redis://localhost"));
    assert!(problem(&wrong).contains("`stream.url`"));

    let mut foreign = RawSettings::default();
    foreign.environment.push(variable("HEADWATER_SERVICE_HOST", "10.0.0.1"));
    foreign.environment.push(variable("HEADWATER_PORT_8080_TCP", "tcp://10.0.0.1:8080"));
    assert!(loaded(&foreign).is_ok(), "Kubernetes describes services in this way");
}

#[test]
fn a_non_loopback_address_requires_a_token() {
    let open = "[http]\nlisten = \"0.0.0.0:8080\"\n";
    let error = problem(&given(open));
    assert!(error.contains("`http.listen`") && error.contains("[[token]]"), "{error}");
    assert!(problem(&given("[worker]\nlisten = \"[::]:1\"\n")).contains("`worker.listen`"));
    let token = "[[token]]\nname = \"ann\"\nrole = \"read\"\ntoken = \"0123456789abcdef\"\n";
    assert!(loaded(&given(&format!("{open}{token}"))).is_ok());
}

#[test]
fn integrations_need_a_unique_id_and_a_secret() {
    let shop = "[[integration]]\nid = \"shop\"\nprovider = \"github\"\n";
    assert!(problem(&given(shop)).contains("no secret"));
    assert!(problem(&given(&format!("{shop}secret_env = \"SHOP\"\n"))).contains("not set"));
    assert!(problem(&given(&format!("{shop}secret = \"\"\n"))).contains("empty"));
    let twice = format!("{shop}secret = \"a\"\n{shop}secret = \"b\"\n");
    assert!(problem(&given(&twice)).contains("duplicate"));
    let odd = "[[integration]]\nid = \"a/b\"\nprovider = \"github\"\nsecret = \"a\"\n";
    assert!(problem(&given(odd)).contains("a/b"));
    let other = "[[integration]]\nid = \"shop\"\nprovider = \"bitbucket\"\n";
    assert!(problem(&given(other)).contains("bitbucket"));
    let desk = "[[integration]]\nid = \"desk\"\nprovider = \"github\"\nsecret = \"a\"\n";
    assert!(problem(&given(desk)).contains("provider `desk`"));
    let both = format!("{shop}secret = \"a\"\nsecret_env = \"A\"\n");
    assert!(problem(&given(&both)).contains("both"));

    // A variable named in the file may have the prefix of settings.
    let mut right = given(&format!("{shop}secret_env = \"HEADWATER_SHOP_SECRET\"\n"));
    right.environment.push(variable("HEADWATER_SHOP_SECRET", "hunter2"));
    assert_eq!(loaded(&right).unwrap().settings.integrations[0].provider, ProviderKind::Github);
}

#[test]
fn notifications_are_checked_by_name() {
    let section = |more: &str| format!("[[notification]]\nid = \"crm\"\n{more}\n");
    let url = "url = \"http://localhost/\"\n";
    assert!(problem(&given(&section(url))).contains("no secret"));
    assert!(problem(&given(&section("url = \"ftp://x\"\nsecret = \"s\""))).contains("invalid url"));
    for (field, part) in [
        ("events = [\"TICKET_REOPENED\"]", "unknown event `TICKET_REOPENED`"),
        ("events = []", "at least one of `TICKET_CREATED`"),
        ("attempts = 0", "allowed: 1 to 1000"),
        ("timeout = \"1m\"", "at most 10s"),
        ("timeout = \"soon\"", "invalid timeout `soon`"),
        ("from = \"yesterday\"", "yesterday"),
        ("colour = \"red\"", "colour"),
    ] {
        let error = problem(&given(&section(&format!("{url}secret = \"s\"\n{field}"))));
        assert!(error.contains(part), "{error}");
    }
    let right = section(&format!("{url}secret = \"s\"\nevents = [\"TICKET_CLOSED\"]"));
    assert!(problem(&given(&format!("{right}{right}"))).contains("duplicate"));
    let settings = loaded(&given(&right)).unwrap().settings;
    let crm = &settings.notifications[0].config;
    assert_eq!((crm.group().as_str(), crm.events.len()), ("notification:crm", 1));
}

#[test]
fn short_tokens_are_rejected() {
    let token = "[[token]]\nname = \"ann\"\nrole = \"admin\"\ntoken = \"short\"\n";
    assert!(problem(&given(token)).contains("at least 16"));
}

#[test]
fn secrets_are_never_shown() {
    let file = "
        [stream]\nurl = \"redis://:hunter2@localhost\"
        [database]\nurl = \"postgres://ann:hunter2@localhost/a\"
        [model]\nurl = \"https://ann:hunter2@localhost/v1\"\nname = \"small\"
        [[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"hunter2\"
        [[notification]]\nid = \"crm\"\nurl = \"https://ann:hunter2@localhost/\"\nsecret = \"hunter2\"
        [[token]]\nname = \"ann\"\nrole = \"read\"\ntoken = \"hunter2hunter2hunter2\"\n";
    let loaded = loaded(&given(file)).unwrap();
    let all =
        [as_text(&loaded), as_json(&loaded), format!("{loaded:?}"), format!("{:?}", given(""))];
    for shown in &all[..3] {
        assert!(!shown.contains("hunter2"), "{shown}");
    }
    // Nor does an error about an invalid file.
    for wrong in [
        "[stream]\nurl = \"rediz://:hunter2@localhost\"\n",
        "[[integration]]\nid = \"a\"\nprovider = \"github\"\nsecret = [\"hunter2\"]\n",
        "[[token]]\nname = \"a\"\nrole = \"king\"\ntoken = \"hunter2\"\n",
        "[[token]]\ntoken = \"hunter2\"\n\n[[token]]\ntoken = hunter2\n",
    ] {
        let error = problem(&given(wrong));
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[test]
fn the_settings_page_is_up_to_date() {
    let path = headwater_testkit::package_folder().join("../../docs/settings.md");
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        page == as_markdown(),
        "docs/settings.md is out of date: cargo run -p headwater -- config --markdown > docs/settings.md"
    );
}

#[test]
fn an_unset_secret_is_an_error_only_where_it_is_required() {
    let file = "[http]\nlisten = \"0.0.0.0:0\"\n
        [[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret_env = \"SHOP\"\nreply_token_env = \"REPLY\"\n
        [[token]]\nname = \"ann\"\nrole = \"read\"\ntoken_env = \"TOKEN\"\n";
    let refused = loaded(&given(file)).unwrap_err().to_string();
    assert!(refused.contains("`SHOP`, `REPLY`, `TOKEN`"), "all in one error: {refused}");
    let settings = load(&given(file), SecretsPolicy::Optional).unwrap().settings;
    let shop = &settings.integrations[0];
    assert!(shop.secret.is_none() && shop.reply_token.is_none() && settings.tokens.is_empty());
    // Errors in the file itself are always reported.
    let nothing = "[[integration]]\nid = \"shop\"\nprovider = \"github\"\n";
    assert!(load(&given(nothing), SecretsPolicy::Optional).is_err());
}
