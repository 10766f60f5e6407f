//! Ways to reach a server: TLS, users, passwords, databases; and what is said when they are wrong.

use anyhow::{Context, Result};
use headwater_stream::{Options, SetName, StreamError, connect};
use headwater_testkit::{Redis, unique};

use crate::Desk;

#[tokio::test]
async fn a_server_with_tls_is_reached_when_its_certificate_is_trusted() -> Result<()> {
    let redis = Redis::builder().tls().start()?;
    let ca = redis.ca_certificate().context("a certificate")?.display().to_string();

    Desk::open(&format!("{}?ca={ca}", redis.url())).await?.round_trip().await
}

#[tokio::test]
async fn a_server_whose_certificate_is_not_trusted_is_refused() -> Result<()> {
    let redis = Redis::builder().tls().start()?;

    let refused = Desk::open(&redis.url()).await.err().context("it was trusted")?;

    let refused = refused.downcast::<StreamError>()?;
    assert!(
        matches!(refused, StreamError::Unavailable { .. } | StreamError::Denied { .. }),
        "{refused}"
    );
    Ok(())
}

#[tokio::test]
async fn a_user_with_the_rights_it_needs_can_do_everything() -> Result<()> {
    let rules = "~* &* +@all -@admin -@dangerous +info";
    let redis = Redis::builder().user("desk", "secret", rules).start()?;

    let desk = Desk::open(&redis.url()).await?;

    desk.round_trip().await?;
    let description = desk.backend.describe();
    assert!(!format!("{description:?}").contains("secret"), "{description:?}");
    Ok(())
}

#[tokio::test]
async fn a_wrong_password_is_denied_and_not_repeated_in_the_error() -> Result<()> {
    let redis = Redis::builder().user("desk", "secret", "~* &* +@all").start()?;
    let url = redis.url().replace("secret", "wrong-one");

    let error = connect(&url, &Options::default()).await.err().context("it was accepted")?;

    assert!(matches!(error, StreamError::Denied { .. }), "{error}");
    assert!(!error.to_string().contains("wrong-one"), "{error}");
    Ok(())
}

#[tokio::test]
async fn a_command_the_user_may_not_use_is_denied_by_name() -> Result<()> {
    let redis = Redis::builder().user("desk", "secret", "~* &* +@all -xadd").start()?;

    let error = Desk::open(&redis.url()).await?.append("espresso").await.err();

    match error.context("it was allowed")? {
        StreamError::Denied { problem } => assert!(problem.contains("xadd"), "{problem}"),
        other => panic!("{other}"),
    }
    Ok(())
}

#[tokio::test]
async fn databases_of_one_server_do_not_mix() -> Result<()> {
    let redis = Redis::start()?;
    let options = Options::default();
    let zero = connect(&redis.url(), &options).await?;
    let seven = connect(&format!("redis://{}/7", redis.addr()), &options).await?;
    let set = SetName::new(unique("set"))?;

    zero.set_add(&set, &["in zero"], None).await?;
    seven.set_add(&set, &["in seven"], None).await?;

    assert_eq!(zero.set_members(&set).await?, ["in zero"]);
    assert_eq!(seven.set_members(&set).await?, ["in seven"]);
    Desk::open(&format!("redis://{}/7", redis.addr())).await?.round_trip().await
}

#[tokio::test]
async fn a_url_that_makes_no_sense_is_refused_with_the_reason() {
    for url in [
        "redis:",
        "redis://",
        "redis://host:port",
        "redis://host:99999",
        "redis://host/seven",
        "redis-sentinel://host:26379",
        "redis-cluster://",
        "redis://host?colour=blue",
        "amqp://host",
        "",
    ] {
        match connect(url, &Options::default()).await {
            Err(StreamError::Invalid { problem, .. }) => assert!(!problem.is_empty(), "{url}"),
            Err(other) => panic!("{url}: {other}"),
            Ok(_) => panic!("{url} was accepted"),
        }
    }
}

#[tokio::test]
async fn nobody_at_home_is_unavailable_within_the_deadline() -> Result<()> {
    let redis = Redis::start()?;
    let url = redis.url();
    redis.kill9()?;

    let error = Desk::open(&url).await.err().context("somebody answered")?;

    assert!(matches!(error.downcast::<StreamError>()?, StreamError::Unavailable { .. }));
    Ok(())
}
