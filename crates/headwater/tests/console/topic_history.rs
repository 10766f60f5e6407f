//! Rates, lag and moves of topics, as the server measured them, on the screens of topics, groups and the assignment.

use anyhow::{Context, Result, ensure};
use headwater_testkit::{BrowserScripts, Redis};
use serde_json::Value;

use crate::fixture::Reader;
use crate::support::{Server, ServerDir};

/// The points of a history whose values have this series.
fn known(history: &Value, series: &str) -> usize {
    let points = history["points"].as_array().map(Vec::as_slice).unwrap_or_default();
    points.iter().filter(|point| point["values"][series].is_u64()).count()
}

/// Of each rebalance of the group `shipping`: the number of partitions with a new owner.
fn moved_to_shipping(history: &Value) -> Vec<u64> {
    let marks = history["marks"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_of_group = |mark: &&Value| mark["kind"] == "rebalance" && mark["group"] == "shipping";
    marks.iter().filter(is_of_group).filter_map(|mark| mark["partitions"].as_u64()).collect()
}

/// Starts a consumer that owns the partitions of `orders`, as the group `shipping`.
pub(crate) fn consume_orders(dir: &ServerDir, redis: &Redis) -> Result<Server> {
    dir.start_soon(&["consume", "orders", "--group", "shipping", "--stream-url", &redis.url()])
}

/// On a server with the data of the fixture, and that consumer: six messages were sent to `orders`, the group `billing` has two left.
pub(crate) async fn topic_charts_are_shown(
    reader: &Reader,
    server: &Server,
    scripts: BrowserScripts,
) -> Result<()> {
    let must_be_accessible = async |path: &str| match scripts {
        BrowserScripts::On => reader.must_be_accessible(path).await,
        BrowserScripts::Off => Ok(()),
    };
    // The group may get its partitions in several steps.
    let is_measured = |_: u16, history: &Value| {
        moved_to_shipping(history).iter().sum::<u64>() >= 4
            && ["lag:billing", "lag:shipping"].iter().all(|lag| known(history, lag) >= 1)
    };
    let history = server.until("/api/v1/history?topic=orders&step=10s", is_measured).await?;
    let moves = moved_to_shipping(&history).into_iter().map(|partitions| match partitions {
        1 => "1 partition has a new owner in orders / shipping".to_owned(),
        many => format!("{many} partitions have new owners in orders / shipping"),
    });
    let moves: Vec<String> = moves.collect();
    let is_busy = |_: u16, page: &Value| page["topics"][0]["rates"]["added_per_second"].is_f64();
    let page = server.until("/api/v1/topics?rates=true", is_busy).await?;
    let added = page["topics"][0]["rates"]["added"].as_array().context("a curve")?;
    ensure!(added.iter().filter_map(Value::as_u64).sum::<u64>() == 6, "{page}");

    reader.open("/console/topics").await?;
    let curve = reader.find("tr[data-key=orders] svg.sparkline").await?;
    let label = curve.attribute("aria-label").await?.unwrap_or_default();
    ensure!(label.starts_with("6 messages in within the last hour"), "{label}");
    must_be_accessible("/console/topics").await?;
    reader.picture("80-topics").await?;

    let topic = "/console/topics/orders";
    let group = "/console/topics/orders/groups/shipping";
    for (path, title, lines) in [
        (topic, "Lag of each group", vec!["billing", "shipping"]),
        (group, "Lag of the group", vec!["not delivered", "in progress"]),
    ] {
        let shown = reader.open(path).await?;
        ensure!(shown.contains("Messages in and settled, per "), "{path}: {shown}");
        ensure!(shown.contains(title) && shown.contains("Marks ("), "{path}: {shown}");
        // The data of both charts as tables, and the rebalance as text.
        for part in ["figure:nth-of-type(1)", "figure:nth-of-type(2)", "[data-live=charts] >"] {
            reader.find(&format!("{part} details > summary")).await?.click().await?;
        }
        let shown = reader.text().await?;
        for sentence in &moves {
            ensure!(shown.contains(sentence.as_str()), "{path} does not show {sentence}: {shown}");
        }
        let flow = reader.find("figure:nth-of-type(1) table").await?.text().await?;
        ensure!(flow.contains("in") && flow.contains("settled"), "{path}: {flow}");
        let lags = reader.find("figure:nth-of-type(2) table").await?.text().await?;
        ensure!(lines.iter().all(|line| lags.contains(line)), "{path}: {lags}");
        ensure!(lags.lines().count() >= 2, "{path}: {lags}");
        must_be_accessible(path).await?;
        reader.picture(&format!("81-{}", title.replace(' ', "-"))).await?;
    }

    let moved = reader.open("/console/assignment").await?;
    ensure!(moved.contains("This process looks every ten seconds"), "{moved}");
    let table = reader.find("[data-live=moves] table").await?.text().await?;
    ensure!(table.contains("orders / shipping") && table.contains("no owner"), "{table}");
    reader.picture("82-moves").await?;
    must_be_accessible("/console/assignment").await
}
