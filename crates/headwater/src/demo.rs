//! The product at work with nothing installed: an embedded stream that survives its reader.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_stream::{
    Backend, ConsumerName, DelayName, Delivery, Due, Fields, GroupName, GroupStart, Options,
    Reclaim, ReclaimFrom, Retention, Settle, Settlement, StreamName, Then, connect,
};

/// The names that every step of the demo shares.
struct Names {
    orders: StreamName,
    baristas: GroupName,
    later: DelayName,
}

/// Runs the demo in a directory of its own and removes it afterwards.
pub(crate) async fn run() -> Result<()> {
    let directory = tempfile::tempdir().context("no temporary directory for the demo")?;
    let url = format!("embedded:{}", directory.path().display());
    let names = Names {
        orders: StreamName::new("orders")?,
        baristas: GroupName::new("baristas")?,
        later: DelayName::new("orders:later")?,
    };

    println!("opened     an embedded stream in a temporary directory; nothing is installed");
    let backend = connect(&url, &Options::default()).await?;
    take_orders(backend.as_ref(), &names).await?;
    serve_until_the_crash(backend.as_ref(), &names).await?;
    backend.close().await?;
    drop(backend);

    let backend = connect(&url, &Options::default()).await?;
    println!("reopened   the stream: what was acknowledged is done, the rest is still there");
    go_on_where_ada_stopped(&backend, &names).await?;
    let stats = backend.stats(&names.orders).await?.context("the stream is gone")?;
    let group = stats.groups.first().context("the group is gone")?;
    println!("finished   {} entries, {} pending: nothing lost", stats.length, group.pending);
    backend.close().await?;
    Ok(())
}

async fn take_orders(backend: &dyn Backend, names: &Names) -> Result<()> {
    backend.ensure_group(&names.orders, &names.baristas, GroupStart::Beginning).await?;
    let orders = ["espresso", "cappuccino", "flat white"].map(|o| Fields::new([("payload", o)]));
    let ids = backend.append(&names.orders, &orders, &Retention::KEEP_ALL).await?;
    println!("appended   {} orders, safe on disk; the last is {}", ids.len(), ids[ids.len() - 1]);
    Ok(())
}

/// Ada settles the first order, has no milk for the second, and is gone before the third.
async fn serve_until_the_crash(backend: &dyn Backend, names: &Names) -> Result<()> {
    let ada = ConsumerName::new("ada")?;
    let mut reader = backend.reader(&names.baristas, &ada).await?;
    let batches = reader.read(std::slice::from_ref(&names.orders), 10, Duration::ZERO).await?;
    let orders = batches.into_iter().flat_map(|batch| batch.entries).collect::<Vec<_>>();
    println!("read       ada got {}", list(&orders));

    let later = Then::PutAside {
        delays: names.later.clone(),
        to: names.orders.clone(),
        due: Due::After(Duration::from_millis(300)),
        fields: orders[1].fields.clone(),
    };
    let entries = [Settlement::done(orders[0].id), Settlement { id: orders[1].id, then: later }];
    settle(backend, names, &ada, &entries).await?;
    println!("settled    {} is done, {} comes back in 300 ms", name(&orders[0]), name(&orders[1]));
    println!("crashed    ada is gone with {} in hand", name(&orders[2]));
    Ok(())
}

async fn go_on_where_ada_stopped(backend: &Arc<dyn Backend>, names: &Names) -> Result<()> {
    let bob = ConsumerName::new("bob")?;
    let reclaim = Reclaim {
        stream: &names.orders,
        group: &names.baristas,
        consumer: &bob,
        fence: None,
        from: ReclaimFrom::Others,
        min_idle: Duration::ZERO,
        after: None,
        count: 10,
    };
    let orders = backend.reclaim(reclaim).await?.entries;
    println!("reclaimed  bob took over {}, delivery {}", list(&orders), orders[0].deliveries);
    let done = orders.iter().map(|order| Settlement::done(order.id)).collect::<Vec<_>>();
    settle(backend.as_ref(), names, &bob, &done).await?;

    backend.wait_due(&names.later, Duration::from_secs(5)).await?;
    backend.take_due(&names.later, 10).await?;
    let mut reader = backend.reader(&names.baristas, &bob).await?;
    let batches = reader.read(std::slice::from_ref(&names.orders), 10, Duration::ZERO).await?;
    let orders = batches.into_iter().flat_map(|batch| batch.entries).collect::<Vec<_>>();
    println!("came back  bob got {} when it was due", list(&orders));
    let done = orders.iter().map(|order| Settlement::done(order.id)).collect::<Vec<_>>();
    settle(backend.as_ref(), names, &bob, &done).await
}

async fn settle(
    backend: &dyn Backend,
    names: &Names,
    consumer: &ConsumerName,
    entries: &[Settlement],
) -> Result<()> {
    let settle =
        Settle { stream: &names.orders, group: &names.baristas, consumer, fence: None, entries };
    backend.settle(settle).await?;
    Ok(())
}

fn list(orders: &[Delivery]) -> String {
    orders.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn name(order: &Delivery) -> String {
    order.fields.get("payload").map_or_else(
        || "an order without payload".to_owned(),
        |payload| String::from_utf8_lossy(payload).into_owned(),
    )
}
