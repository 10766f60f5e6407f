//! The names of stream assignment: this file spells them all.
//!
//! | what | name |
//! |---|---|
//! | input stream | `<service>-input` |
//! | its group | `<service>-group` |
//! | dead letters | `<service>-input:dlq` |
//! | lease of a data stream | `mutex:<stream>`; for a service with a hash tag, `mutex:{tag}:<stream>` |
//! | live consumers | the set `<service>-members`, and a lease `<service>-member:<holder>` each |
//! | holder, and consumer of the group | `<consumer>:<start>`, where no two starts are the same |
//!
//! On a Redis Cluster a lease must be in the slot of the input, so the service needs a hash tag there: `{orders}`, or
//! `{eu}:orders`. Services without one share the leases `mutex:<stream>`: their data streams need distinct names.

use headwater_stream::{
    ConsumerName, GroupName, HolderName, LeaseName, LivenessLease, Result, SetName, StreamName,
    hash_tag, start_id,
};

/// The names of one service.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub(crate) service: String,
    pub(crate) input: StreamName,
    pub(crate) group: GroupName,
    pub(crate) dead_letters: StreamName,
    pub(crate) members: SetName,
    /// Prefix of the leases of all data streams.
    pub(crate) lease_prefix: String,
}

impl Names {
    pub(crate) fn new(service: &str) -> Result<Self> {
        Ok(Self {
            service: service.to_owned(),
            // First: its error names the limit that also applies to the others.
            input: StreamName::new(format!("{service}-input"))?,
            group: GroupName::new(format!("{service}-group"))?,
            dead_letters: StreamName::new(format!("{service}-input:dlq"))?,
            members: SetName::new(format!("{service}-members"))?,
            lease_prefix: match hash_tag(service) {
                Some(tag) => format!("mutex:{{{tag}}}:"),
                None => "mutex:".to_owned(),
            },
        })
    }

    /// The lease of a data stream.
    pub(crate) fn lease(&self, stream: &StreamName) -> Result<LeaseName> {
        LeaseName::new(format!("{}{stream}", self.lease_prefix))
    }

    /// The data stream of a lease, if it belongs to this service.
    pub(crate) fn stream_of(&self, lease: &LeaseName) -> Option<StreamName> {
        StreamName::new(lease.as_str().strip_prefix(&self.lease_prefix)?).ok()
    }

    /// The lease that shows that a consumer is alive.
    pub(crate) fn member_lease(&self, holder: &str) -> Result<LeaseName> {
        LeaseName::new(format!("{}-member:{holder}", self.service))
    }

    /// A member of the list and its lease; `None` for a text that is not the name of a holder.
    pub(crate) fn member(&self, entry: &str) -> Option<(HolderName, LivenessLease)> {
        let holder = HolderName::new(entry).ok()?;
        let lease = self.member_lease(entry).ok()?;
        Some((holder.clone(), LivenessLease { copies: vec![lease], holder: Some(holder) }))
    }
}

/// The identity of one start of a consumer: as lease holder and in the group.
#[derive(Clone, Debug)]
pub(crate) struct MemberIdentity {
    pub(crate) holder: HolderName,
    pub(crate) consumer: ConsumerName,
}

impl MemberIdentity {
    /// An identity that is unique for every start.
    pub(crate) fn new(consumer: &str) -> Result<Self> {
        // Validate the name alone first, so that the error refers to the caller's input.
        ConsumerName::new(consumer)?;
        let name = format!("{consumer}:{}", start_id());
        Ok(Self { holder: HolderName::new(&name)?, consumer: ConsumerName::new(&name)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(name: &str) -> StreamName {
        StreamName::new(name).unwrap()
    }

    #[test]
    fn a_plain_service_has_interoperable_names() {
        let names = Names::new("orders").unwrap();
        assert_eq!(names.input.as_str(), "orders-input");
        assert_eq!(names.group.as_str(), "orders-group");
        assert_eq!(names.lease(&stream("s1")).unwrap().as_str(), "mutex:s1");
    }

    #[test]
    fn leases_have_the_hash_tag_of_their_service() {
        for service in ["{orders}", "{orders}:eu", "eu:{orders}"] {
            let names = Names::new(service).unwrap();
            for data in ["s1", "{other}:s1", "a{b"] {
                let lease = names.lease(&stream(data)).unwrap();
                assert_eq!(hash_tag(lease.as_str()), Some("orders"));
                assert_eq!(hash_tag(names.input.as_str()), Some("orders"));
                assert_eq!(hash_tag(names.dead_letters.as_str()), Some("orders"));
                assert_eq!(names.stream_of(&lease), Some(stream(data)));
            }
        }
    }

    #[test]
    fn a_lease_of_another_service_has_no_data_stream() {
        let names = Names::new("{orders}").unwrap();
        for foreign in ["mutex:s1", "mutex:{other}:s1", "{orders}-member:a", "mutex:{orders}:"] {
            assert_eq!(names.stream_of(&LeaseName::new(foreign).unwrap()), None, "{foreign}");
        }
    }

    #[test]
    fn every_start_of_a_consumer_has_a_unique_identity() {
        let (first, second) =
            (MemberIdentity::new("ada").unwrap(), MemberIdentity::new("ada").unwrap());
        assert_ne!(first.holder, second.holder);
        assert_ne!(first.consumer, second.consumer);
        assert!(first.holder.as_str().starts_with("ada:"));
        assert!(MemberIdentity::new("").is_err());
    }
}
