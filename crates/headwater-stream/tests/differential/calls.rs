//! Every call of a sequence, and its result as text.

use std::collections::hash_map;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::{
    DelayId, Direction, Entry, EntryId, Fence, Fields, GroupStart, IdempotentEntry, LeaseName,
    PendingDeliveryQuery, ReclaimFrom, Retention, SettleAction, Settlement, StreamName, TrimGuard,
};

use crate::observed_backend::*;
use crate::operations::*;

impl ObservedBackend<'_> {
    fn start(&self, stream: u8, start: &Start) -> GroupStart {
        match start {
            Start::Beginning => GroupStart::Beginning,
            Start::End => GroupStart::End,
            Start::After(which) => GroupStart::After(self.id(stream, *which)),
        }
    }

    /// Runs one call and returns its result as text.
    pub(crate) async fn run(&mut self, operation: &Operation) -> CallResult {
        use Operation::*;
        let backend = self.backend();
        let text = match operation {
            Append { stream, count } => {
                let entries: Vec<Fields> = (0..*count).map(|_| self.next_fields()).collect();
                let name = self.stream(*stream);
                let answer = backend.append(&name, &entries, &Retention::KEEP_ALL).await;
                if let Ok(ids) = &answer {
                    self.entries.entry(*stream).or_default().extend(ids);
                }
                errors(answer, |ids| format!("{} ids", ids.len()))
            }
            AppendOnce { stream, ids } => {
                let once = |id: &u8| IdempotentEntry {
                    id: format!("once{id}"),
                    fields: self.next_fields(),
                };
                let entries: Vec<IdempotentEntry> = ids.iter().map(once).collect();
                let name = self.stream(*stream);
                let keep = &Retention::KEEP_ALL;
                let answer = backend.append_once(&name, &entries, HOUR, keep).await;
                if let Ok(appended) = &answer {
                    let new = appended.iter().filter(|one| !one.duplicate).map(|one| one.id);
                    self.entries.entry(*stream).or_default().extend(new);
                }
                errors(answer, |appended| {
                    let show = |one: &headwater_stream::AppendedEntry| {
                        format!("{} {}", self.show_id(*stream, one.id), one.duplicate)
                    };
                    appended.iter().map(show).collect::<Vec<_>>().join(", ")
                })
            }
            Appended { stream, ids } => {
                let ids: Vec<String> = ids.iter().map(|id| format!("once{id}")).collect();
                let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
                errors(backend.appended(&self.stream(*stream), &ids).await, |found| {
                    let show = |id: Option<EntryId>| id.map(|id| self.show_id(*stream, id));
                    format!("{:?}", found.into_iter().map(show).collect::<Vec<_>>())
                })
            }
            EnsureGroup { stream, group: g, start } => {
                let start = self.start(*stream, start);
                let answer = backend.ensure_group(&self.stream(*stream), &group(*g), start).await;
                errors(answer, |new| format!("new={new}"))
            }
            ResetGroup { stream, group: g, start } => {
                let start = self.start(*stream, start);
                let answer = backend.reset_group(&self.stream(*stream), &group(*g), start).await;
                errors(answer, |was| format!("was={was}"))
            }
            RemoveGroup { stream, group: g } => {
                let answer = backend.remove_group(&self.stream(*stream), &group(*g)).await;
                errors(answer, |was| format!("was={was}"))
            }
            Read { streams, group, consumer, count } => {
                self.read(streams, *group, *consumer, *count).await
            }
            Tail { stream, after, count } => {
                let after = after.map_or(EntryId::MIN, |which| self.id(*stream, which));
                let positions = [(self.stream(*stream), after)];
                let tail = &mut self.connection.tail;
                let answer = tail.read(&positions, usize::from(*count), Duration::ZERO).await;
                errors(answer, |batches| {
                    let entries: Vec<Entry> = batches.into_iter().flat_map(|b| b.entries).collect();
                    self.show_entries(*stream, &entries)
                })
            }
            Settle { stream, group, consumer, guard, entries } => {
                self.settle(*stream, *group, *consumer, *guard, entries).await
            }
            KeepAlive { stream, group: g, consumer: c, ids } => {
                let ids = self.ids(*stream, ids);
                let name = self.stream(*stream);
                let answer = backend.keep_alive(&name, &group(*g), &consumer(*c), &ids).await;
                errors(answer, |lost| self.show_ids(*stream, &lost))
            }
            Reclaim { .. } => self.reclaim(operation).await,
            Pending { stream, group: g, consumer: c, long_idle, after, count } => {
                let c = c.map(consumer);
                let query = PendingDeliveryQuery {
                    stream: &self.stream(*stream),
                    group: &group(*g),
                    consumer: c.as_ref(),
                    min_idle: idle(*long_idle),
                    after: after.map(|which| self.id(*stream, which)),
                    count: usize::from(*count),
                };
                errors(backend.pending(query).await, |all| {
                    let show = |p: &headwater_stream::PendingDelivery| {
                        format!("{} {} {}", self.show_id(*stream, p.id), p.consumer, p.deliveries)
                    };
                    all.iter().map(show).collect::<Vec<_>>().join(", ")
                })
            }
            Range { stream, from, to, backward, count } => {
                let range = headwater_stream::Range {
                    from: from.map_or(EntryId::MIN, |which| self.id(*stream, which)),
                    to: to.map_or(EntryId::MAX, |which| self.id(*stream, which)),
                    direction: if *backward { Direction::Backward } else { Direction::Forward },
                    count: usize::from(*count),
                };
                let answer = backend.range(&self.stream(*stream), range).await;
                errors(answer, |entries| self.show_entries(*stream, &entries))
            }
            Trim { stream, len, force } => {
                let guard = if *force { TrimGuard::Force } else { TrimGuard::Safe };
                self.holes[usize::from(*stream)] |= *force;
                let retention = Retention::max_len(u64::from(*len));
                let answer = backend.trim(&self.stream(*stream), &retention, guard).await;
                errors(answer, |trimmed| format!("{trimmed:?}"))
            }
            DeleteEntries { stream, ids } => {
                self.holes[usize::from(*stream)] = true;
                let ids = self.ids(*stream, ids);
                let answer = backend.delete_entries(&self.stream(*stream), &ids).await;
                errors(answer, |deleted| format!("{deleted} deleted"))
            }
            DeleteStream { stream } => {
                let answer = backend.delete_stream(&self.stream(*stream)).await;
                // Otherwise a new stream of that name could reuse an id of the old one.
                tokio::time::sleep(Duration::from_millis(2)).await;
                errors(answer, |was| format!("was={was}"))
            }
            Stats { stream } => return self.stats(*stream).await,
            RemoveIdle { stream, group: g, long_idle } => {
                let name = self.stream(*stream);
                let min_idle = idle(*long_idle);
                let answer = backend.remove_idle_consumers(&name, &group(*g), min_idle).await;
                errors(answer, |names| format!("{names:?}"))
            }
            Schedule { delays, items } => {
                let items: Vec<headwater_stream::ScheduleRequest> = (items.iter())
                    .map(|(to, when)| headwater_stream::ScheduleRequest {
                        to: self.stream(*to),
                        due: Self::due(*when),
                        fields: self.next_fields(),
                    })
                    .collect();
                let answer = backend.schedule(&self.delays(*delays), &items).await;
                if let Ok(ids) = &answer {
                    self.delayed.entry(*delays).or_default().extend(ids);
                }
                errors(answer, |ids| format!("{} ids, growing={}", ids.len(), ids.is_sorted()))
            }
            Cancel { delays, id } => {
                let id = nth(self.delayed.get(delays), *id).unwrap_or(DelayId(1));
                errors(backend.cancel(&self.delays(*delays), id).await, |was| format!("was={was}"))
            }
            TakeDue { delays, count } => {
                let answer = backend.promote_due(&self.delays(*delays), usize::from(*count)).await;
                self.discover().await;
                errors(answer, |returned| {
                    let show = |r: &headwater_stream::PromotedEntry| {
                        let stream = (0..=STREAMS).find(|number| self.stream(*number) == r.stream);
                        let stream = stream.expect("only to streams of this sequence");
                        let delay = place(self.delayed.get(delays), &r.delay);
                        format!("{delay} to {stream} as {}", self.show_id(stream, r.id))
                    };
                    returned.iter().map(show).collect::<Vec<_>>().join(", ")
                })
            }
            WaitDue { delays } => {
                let answer = backend.wait_until_due(&self.delays(*delays), Duration::ZERO).await;
                errors(answer, |due| format!("due={due}"))
            }
            DelayStats { delays } => {
                errors(backend.delay_stats(&self.delays(*delays)).await, |stats| {
                    format!(
                        "{} waiting, next {:?}",
                        stats.waiting,
                        stats.next_due.map(Self::show_due)
                    )
                })
            }
            Delayed { delays, offset, count } => {
                self.list_delayed(*delays, usize::from(*offset), usize::from(*count)).await
            }
            DeleteDelays { delays } => {
                errors(backend.delete_delay_set(&self.delays(*delays)).await, |was| {
                    format!("was={was}")
                })
            }
            Acquire { lease, holder: h } => {
                let answer = backend.acquire(&self.lease(*lease), &holder(*h), HOUR).await;
                errors(answer, |acquired| match acquired {
                    headwater_stream::AcquireResult::Won(epoch) => {
                        format!("won {}", self.show_epoch(*lease, epoch))
                    }
                    headwater_stream::AcquireResult::Held { by, .. } => format!("held by {by}"),
                })
            }
            Renew { holder: h, leases } => {
                let fences: Vec<Fence> = leases.iter().map(|which| self.fence(*which)).collect();
                let answer = backend.renew(&holder(*h), &fences, HOUR).await;
                errors(answer, |renewed| format!("{renewed:?}"))
            }
            Release { holder: h, leases } => {
                let fences: Vec<Fence> = leases.iter().map(|which| self.fence(*which)).collect();
                let answer = backend.release(&holder(*h), &fences).await;
                errors(answer, |released| format!("{released} released"))
            }
            Leases => {
                let names: Vec<LeaseName> = (0..=LEASES).map(|n| self.lease(n)).collect();
                errors(backend.leases(&names).await, |found| {
                    let shown = found.into_iter().zip(0..).map(|(info, lease)| {
                        info.map(|i| format!("{} {}", i.holder, self.show_epoch(lease, i.epoch)))
                    });
                    format!("{:?}", shown.collect::<Vec<_>>())
                })
            }
            Begin { ids } => {
                let ids: Vec<String> = ids.iter().map(|id| format!("id{id}")).collect();
                let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
                let answer = backend.dedup_begin(&self.scope(), &ids, HOUR).await;
                errors(answer, |begun| format!("{begun:?}"))
            }
            Finish { ids } => {
                let ids: Vec<(String, Bytes)> =
                    ids.iter().map(|(id, value)| (format!("id{id}"), value_of(*value))).collect();
                let done: Vec<(&str, Bytes)> =
                    ids.iter().map(|(id, value)| (id.as_str(), value.clone())).collect();
                let answer = backend.dedup_finish(&self.scope(), &done, HOUR).await;
                errors(answer, |()| "finished".to_owned())
            }
            Abandon { ids } => {
                let ids: Vec<String> = ids.iter().map(|id| format!("id{id}")).collect();
                let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
                let answer = backend.dedup_abandon(&self.scope(), &ids).await;
                errors(answer, |()| "abandoned".to_owned())
            }
            _ => self.registry(operation).await,
        };
        CallResult { text, lags: Vec::new() }
    }

    async fn registry(&self, operation: &Operation) -> String {
        use Operation::*;
        let backend = self.backend();
        let texts = |members: &[u8]| -> Vec<String> {
            members.iter().map(|member| format!("m{member}")).collect()
        };
        fn refs(texts: &[String]) -> Vec<&str> {
            texts.iter().map(String::as_str).collect()
        }
        match operation {
            SetAdd { set, members } => {
                let members = texts(members);
                let answer = backend.set_add(&self.set(*set), &refs(&members), None).await;
                errors(answer, |new| format!("{new} new"))
            }
            SetRemove { set, members } => {
                let members = texts(members);
                let answer = backend.set_remove(&self.set(*set), &refs(&members)).await;
                errors(answer, |removed| format!("{removed} removed"))
            }
            SetMembers { set } => {
                errors(backend.set_members(&self.set(*set)).await, |all| format!("{all:?}"))
            }
            SetContains { set, members } => {
                let members = texts(members);
                let answer = backend.set_contains(&self.set(*set), &refs(&members)).await;
                errors(answer, |found| format!("{found:?}"))
            }
            MapCreate { map, fields } => {
                let answer = backend.map_create(&self.map(*map), &registry_map(fields)).await;
                errors(answer, |created| format!("created={created}"))
            }
            MapUpdate { map, expect, fields } => {
                let expect = expect.map(|(name, value)| (format!("f{name}"), value_of(value)));
                let expect = expect.as_ref().map(|(name, value)| (name.as_str(), &value[..]));
                let fields = registry_map(fields);
                let answer = backend.map_update(&self.map(*map), expect, &fields).await;
                errors(answer, |updated| format!("updated={updated}"))
            }
            MapGet { map } => {
                errors(backend.map_get(&self.map(*map)).await, |fields| format!("{fields:?}"))
            }
            MapDelete { map } => {
                errors(backend.map_delete(&self.map(*map)).await, |was| format!("was={was}"))
            }
            other => unreachable!("{other:?} is not about the registry"),
        }
    }

    async fn read(&mut self, streams: &[u8], g: u8, c: u8, count: u8) -> String {
        let names: Vec<StreamName> = streams.iter().map(|number| self.stream(*number)).collect();
        let backend = self.backend();
        let reader = match self.connection.readers.entry((g, c)) {
            hash_map::Entry::Occupied(reader) => reader.into_mut(),
            hash_map::Entry::Vacant(place) => match backend.reader(&group(g), &consumer(c)).await {
                Ok(reader) => place.insert(reader),
                Err(error) => return errors::<()>(Err(error), |()| String::new()),
            },
        };
        let answer = reader.read(&names, usize::from(count), Duration::ZERO).await;
        errors(answer, |batches| {
            let mut shown = String::new();
            for batch in batches {
                let at = names.iter().position(|name| *name == batch.stream);
                let stream = streams[at.expect("only what was asked for")];
                for entry in batch.entries {
                    let id = self.show_id(stream, entry.id);
                    shown += &format!("{stream}:{id} {:?} x{}, ", entry.fields, entry.deliveries);
                }
            }
            shown
        })
    }

    async fn settle(
        &mut self,
        stream: u8,
        g: u8,
        c: u8,
        guard: Guard,
        entries: &[(Nth, End)],
    ) -> String {
        self.holes[usize::from(stream)] |=
            entries.iter().any(|(_, end)| matches!(end, End::Delete));
        let settlements: Vec<Settlement> = (entries.iter())
            .map(|(which, end)| {
                let then = match end {
                    End::Done => SettleAction::Ack,
                    End::Delete => SettleAction::Delete,
                    End::Release => SettleAction::Release,
                    End::Append(to) => {
                        SettleAction::Append { to: self.stream(*to), fields: self.next_fields() }
                    }
                    End::Schedule(delays, to, when) => SettleAction::Reschedule {
                        delays: self.delays(*delays),
                        to: self.stream(*to),
                        due: Self::due(*when),
                        fields: self.next_fields(),
                    },
                };
                Settlement { id: self.id(stream, *which), action: then }
            })
            .collect();
        let fence = guard.map(|guard| self.fence(guard));
        let settle = headwater_stream::SettleBatch {
            stream: &self.stream(stream),
            group: &group(g),
            consumer: &consumer(c),
            fence: fence.as_ref(),
            entries: &settlements,
        };
        let answer = self.backend().settle(settle).await;
        self.discover().await;
        errors(answer, |settled| format!("{settled:?}"))
    }

    async fn reclaim(&mut self, operation: &Operation) -> String {
        let Operation::Reclaim {
            stream,
            group: g,
            consumer: c,
            guard,
            from,
            long_idle,
            after,
            count,
        } = operation
        else {
            unreachable!("{operation:?} is not a reclaim");
        };
        let fence = guard.map(|guard| self.fence(guard));
        let (other, ids);
        let from = match from {
            From::Anyone => ReclaimFrom::Anyone,
            From::Others => ReclaimFrom::Others,
            From::Consumer(number) => {
                other = consumer(*number);
                ReclaimFrom::Consumer(&other)
            }
            From::Ids(which) => {
                ids = self.ids(*stream, which);
                ReclaimFrom::Ids(&ids)
            }
        };
        let reclaim = headwater_stream::ReclaimRequest {
            stream: &self.stream(*stream),
            group: &group(*g),
            consumer: &consumer(*c),
            fence: fence.as_ref(),
            from,
            min_idle: idle(*long_idle),
            after: after.map(|which| self.id(*stream, which)),
            count: usize::from(*count),
        };
        let answer = self.backend().reclaim(reclaim).await;
        errors(answer, |mut found| {
            // The order of deleted ids is unspecified.
            found.deleted.sort();
            let show = |entry: &headwater_stream::DeliveredEntry| {
                let id = self.show_id(*stream, entry.id);
                format!("{id} {:?} x{}", entry.fields, entry.deliveries)
            };
            let entries: Vec<String> = found.entries.iter().map(show).collect();
            let deleted = self.show_ids(*stream, &found.deleted);
            let next = found.next.map(|id| self.show_id(*stream, id));
            format!("{entries:?}, deleted [{deleted}], next {next:?}")
        })
    }

    pub(crate) async fn stats(&self, stream: u8) -> CallResult {
        let mut lags = Vec::new();
        let text = errors(self.backend().stats(&self.stream(stream)).await, |stats| {
            let Some(stats) = stats else { return "none".to_owned() };
            let show = |id: Option<EntryId>| id.map(|id| self.show_id(stream, id));
            let mut text = format!(
                "{} from {:?} to {:?}",
                stats.length,
                show(stats.first_id),
                show(stats.last_id)
            );
            for group in stats.groups {
                lags.push(group.lag.filter(|_| !self.holes[usize::from(stream)]));
                let last = self.show_id(stream, group.last_delivered);
                text += &format!("; {} {} pending, last {last}:", group.name, group.pending);
                for consumer in group.consumers {
                    text += &format!(" {}={}", consumer.name, consumer.pending);
                }
            }
            text
        });
        CallResult { text, lags }
    }

    async fn list_delayed(&self, delays: u8, offset: usize, count: usize) -> String {
        errors(self.backend().delayed(&self.delays(delays), offset, count).await, |all| {
            let show = |d: &headwater_stream::DelayedEntry| {
                let id = place(self.delayed.get(&delays), &d.id);
                let to = d.to.as_str().rsplit(':').next().unwrap_or_default().to_owned();
                format!("{id} to {to} {} {:?}", Self::show_due(d.due_at), d.fields)
            };
            all.iter().map(show).collect::<Vec<_>>().join(", ")
        })
    }
}
