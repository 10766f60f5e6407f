//! The sampler of topics.

use crate::fixture::on_every_backend;

/// On its own servers, because other tests leave invalid topics on the shared ones.
mod a_sampler_shows_length_and_pending_and_zero_for_what_is_gone {
    use anyhow::Result;
    use headwater_testkit::{Cluster, Redis};

    use super::bodies::a_sampler_shows_length_and_pending_and_zero_for_what_is_gone as shows;
    use crate::fixture::QueueFixture;

    #[tokio::test(flavor = "multi_thread")]
    async fn embedded() -> Result<()> {
        shows(QueueFixture::embedded().await?).await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn on_redis() -> Result<()> {
        let redis = Redis::start()?;
        shows(QueueFixture::at(&redis.url()).await?).await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn on_a_cluster() -> Result<()> {
        let cluster = Cluster::start()?;
        shows(QueueFixture::at(&cluster.url()).await?).await
    }
}

on_every_backend! {
    a_sampler_stops_on_shutdown
}

mod bodies {
    use std::collections::HashMap;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::GroupMeasure;
    use metrics::{
        Counter, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    };

    use crate::fixture::*;

    /// Keeps the last value of every gauge.
    #[derive(Default)]
    struct Gauges(Arc<Mutex<HashMap<String, f64>>>);

    struct Kept(Arc<Mutex<HashMap<String, f64>>>, String);

    impl GaugeFn for Kept {
        fn increment(&self, _: f64) {}
        fn decrement(&self, _: f64) {}
        fn set(&self, value: f64) {
            self.0.lock().expect("it exists").insert(self.1.clone(), value);
        }
    }

    impl Recorder for Gauges {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
            Counter::noop()
        }
        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            let mut name = key.name().to_owned();
            for label in key.labels() {
                name += &format!(" {}={}", label.key(), label.value());
            }
            Gauge::from_arc(Arc::new(Kept(Arc::clone(&self.0), name)))
        }
        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    pub(super) async fn a_sampler_shows_length_and_pending_and_zero_for_what_is_gone(
        fixture: QueueFixture,
    ) -> Result<()> {
        let gauges = Gauges::default();
        let values = Arc::clone(&gauges.0);
        // Other tests of this process may add values.
        let _ = metrics::set_global_recorder(gauges);
        let value = |name: String| values.lock().expect("it exists").get(&name).copied();
        let topic = fixture.topic.clone();
        let length = |p: u16| value(format!("headwater_topic_length topic={topic} partition={p}"));
        let pending =
            |p: u16| value(format!("headwater_pending topic={topic} partition={p} group={GROUP}"));
        let plain = QueueFixture { topic: headwater_testkit::unique("plain"), ..fixture };
        plain.send(0, "plain").await?;
        let fixture = QueueFixture { topic: topic.clone(), ..plain_clone(&plain) };
        fixture.create(2).await?;
        fixture.send_many(2, 5).await?;
        fixture.deliver(0, "ann", 2).await?;

        let mut sampler = fixture.queue.sampler(&[&plain.topic])?;
        sampler.run_once().await?;

        assert_eq!((length(0), length(1)), (Some(3.0), Some(2.0)));
        assert_eq!((pending(0), pending(1)), (Some(2.0), None));
        let of_plain = format!("headwater_topic_length topic={} partition=0", plain.topic);
        assert_eq!(value(of_plain), Some(1.0));
        let measured = |sampler: &headwater_queue::Sampler| {
            let topic = &sampler.measured()[&fixture.topic];
            (topic.partitions, topic.added, topic.groups[GROUP])
        };
        let group = |pending, lag| GroupMeasure { pending, lag: Some(lag) };
        // The group exists on one partition only: on the other, it has read nothing.
        assert_eq!(measured(&sampler), (2, Some(5), group(2, 3)));
        let is_created = |topic: &str| sampler.measured()[topic].is_created;
        assert!(is_created(&fixture.topic) && !is_created(&plain.topic));
        fixture.send_many(2, 4).await?;
        fixture.deliver(0, "ann", 1).await?;
        sampler.run_once().await?;
        assert_eq!(measured(&sampler), (2, Some(9), group(3, 6)));

        fixture.queue.topics().delete(&fixture.topic).await?;
        sampler.run_once().await?;
        assert_eq!((length(0), pending(0)), (Some(0.0), Some(0.0)));
        assert!(!sampler.measured().contains_key(&topic));
        assert_invalid(fixture.queue.sampler(&[""]), "a topic name");
        Ok(())
    }

    fn plain_clone(fixture: &QueueFixture) -> QueueFixture {
        QueueFixture {
            queue: fixture.queue.clone(),
            producer: fixture.producer.clone(),
            topic: String::new(),
        }
    }

    pub(super) async fn a_sampler_stops_on_shutdown(fixture: QueueFixture) -> Result<()> {
        let sampler = fixture.queue.sampler(&[])?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(sampler.run(Duration::from_millis(5), async {
            let _ = stopped.await;
        }));
        stop.send(()).expect("it runs");
        running.await??;
        let sampler = fixture.queue.sampler(&[])?;
        assert_invalid(sampler.run(Duration::ZERO, async {}).await, "every");
        Ok(())
    }
}
