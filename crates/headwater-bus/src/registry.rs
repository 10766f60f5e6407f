//! The registry of event types: the allow-list of a bus, with upcasters from older versions.
//!
//! Upstream: the application registers its types once. Downstream: every bus decodes entries with it.
//! Guarantees: events of unregistered types are rejected or parked. A panic of an upcaster or of a type's decoder fails
//! only that entry.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_stream::BoxError;
use serde_json::Value as Json;

use crate::error::{BusError, DecodeError, Result};
use crate::event::{Envelope, Event, EventValue, OutgoingEvent, Scope};
use crate::handler::panic_text;
use crate::limits::TYPE_BYTES_MAX;

/// The allow-list of event types.
#[derive(Clone, Default)]
pub struct EventRegistry {
    types: BTreeMap<String, Registration>,
}

#[derive(Clone)]
struct Registration {
    type_id: TypeId,
    version: u32,
    scope: Scope,
    decode: fn(&[u8]) -> serde_json::Result<EventValue>,
    decode_lifted: fn(Json) -> serde_json::Result<EventValue>,
    schema: fn() -> Json,
    /// Upcasters by the version they convert from.
    upcasters: BTreeMap<u32, Upcaster>,
}

type Upcaster = Arc<dyn Fn(Json) -> Result<Json, BoxError> + Send + Sync>;

impl EventRegistry {
    /// Creates an empty registry.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Registers a type. Idempotent.
    pub fn register<E: Event>(&mut self) -> Result<&mut Self> {
        check_name(E::TYPE)?;
        if E::VERSION == 0 {
            let problem = "its version is 0; versions start at 1";
            return Err(BusError::invalid(format!("event type `{}`", E::TYPE), problem));
        }
        if let Some(known) = self.types.get(E::TYPE) {
            if known.type_id == TypeId::of::<E>() {
                return Ok(self);
            }
            let problem = "another Rust type is registered under this name";
            return Err(BusError::invalid(format!("event type `{}`", E::TYPE), problem));
        }
        let registration = Registration {
            type_id: TypeId::of::<E>(),
            version: E::VERSION,
            scope: E::SCOPE,
            decode: |json| Ok(Arc::new(serde_json::from_slice::<E>(json)?)),
            decode_lifted: |json| Ok(Arc::new(serde_json::from_value::<E>(json)?)),
            schema: || schemars::schema_for!(E).to_value(),
            upcasters: BTreeMap::new(),
        };
        self.types.insert(E::TYPE.to_owned(), registration);
        Ok(self)
    }

    /// Registers a type, for chaining.
    pub fn with<E: Event>(mut self) -> Result<Self> {
        self.register::<E>()?;
        Ok(self)
    }

    /// Adds an upcaster from version `from` to the next one. Registers `E` if needed.
    pub fn with_upcaster<E: Event>(
        mut self,
        from: u32,
        upcast: impl Fn(Json) -> Result<Json, BoxError> + Send + Sync + 'static,
    ) -> Result<Self> {
        self.register::<E>()?;
        if from == 0 || from >= E::VERSION {
            let problem = format!("from version {from}, but the type is at version {}", E::VERSION);
            return Err(BusError::invalid(format!("upcaster of `{}`", E::TYPE), problem));
        }
        let registration = self.types.get_mut(E::TYPE).expect("it was registered above");
        if registration.upcasters.insert(from, Arc::new(upcast)).is_some() {
            let problem = format!("there are two upcasters from version {from}");
            return Err(BusError::invalid(format!("upcaster of `{}`", E::TYPE), problem));
        }
        Ok(self)
    }

    /// Names and versions of all types, sorted by name.
    pub fn types(&self) -> impl Iterator<Item = (&str, u32)> {
        self.types.iter().map(|(name, known)| (name.as_str(), known.version))
    }

    /// The JSON Schema of a type.
    pub fn schema(&self, event_type: &str) -> Option<Json> {
        self.types.get(event_type).map(|known| (known.schema)())
    }

    /// The JSON Schemas of all types by name.
    pub fn schemas(&self) -> BTreeMap<String, Json> {
        self.types.iter().map(|(name, known)| (name.clone(), (known.schema)())).collect()
    }

    /// Decodes the event in an envelope, upcast to the version of `E`.
    pub fn decode<E: Event>(&self, envelope: &Envelope) -> Result<Arc<E>> {
        self.check::<E>()?;
        if envelope.event_type != E::TYPE {
            let problem = format!("it is `{}`, not `{}`", envelope.event_type, E::TYPE);
            return Err(BusError::invalid("type of an event", problem));
        }
        let value = self.decode_any(envelope)?;
        Ok(value.downcast::<E>().expect("the registry decodes a type to what was registered"))
    }

    /// Decodes the event in an envelope, whatever its type is.
    pub(crate) fn decode_any(&self, envelope: &Envelope) -> Result<EventValue, DecodeError> {
        let event_type = &envelope.event_type;
        let known = self
            .types
            .get(event_type)
            .ok_or_else(|| DecodeError::UnknownType { event_type: event_type.clone() })?;
        // Application code on untrusted data: a panic must not stop the reader. The code gets nothing that it could
        // leave in an inconsistent state.
        catch_unwind(AssertUnwindSafe(|| known.read(envelope))).unwrap_or_else(|panic| {
            let problem = format!("decoding panicked: {}", panic_text(&*panic));
            Err(decode_error(envelope, problem))
        })
    }

    /// Checks that `E` is the type registered under its name.
    pub(crate) fn check<E: Event>(&self) -> Result<()> {
        self.check_id(E::TYPE, TypeId::of::<E>())
    }

    /// Checks that an event may be published.
    pub(crate) fn check_outgoing(&self, event: &OutgoingEvent) -> Result<()> {
        self.check_id(event.event_type, (*event.value).type_id())
    }

    fn check_id(&self, event_type: &str, type_id: TypeId) -> Result<()> {
        let problem = match self.types.get(event_type) {
            Some(known) if known.type_id == type_id => return Ok(()),
            Some(_) => "another Rust type is registered under this name",
            None => "register it first",
        };
        Err(BusError::NotRegistered {
            event_type: event_type.to_owned(),
            problem: problem.to_owned(),
        })
    }

    /// Whether payloads of this type and version can be decoded.
    pub(crate) fn reads(&self, event_type: &str, version: u32) -> bool {
        self.types.get(event_type).is_some_and(|known| {
            version <= known.version
                && (version..known.version).all(|step| known.upcasters.contains_key(&step))
        })
    }

    /// Where events of a type are stored.
    pub fn scope(&self, event_type: &str) -> Option<Scope> {
        self.types.get(event_type).map(|known| known.scope)
    }
}

impl Registration {
    /// Decodes an event of this type.
    fn read(&self, envelope: &Envelope) -> Result<EventValue, DecodeError> {
        let Envelope { event_type, version, payload, .. } = envelope;
        let unfit = |problem: String| decode_error(envelope, problem);
        if *version == self.version {
            return (self.decode)(payload).map_err(|error| unfit(error.to_string()));
        }
        let mut json: Json =
            serde_json::from_slice(payload).map_err(|error| unfit(error.to_string()))?;
        for step in *version..self.version {
            let Some(upcast) = self.upcasters.get(&step) else {
                return Err(self.unreadable(event_type, *version));
            };
            json = upcast(json).map_err(|error| unfit(format!("from version {step}: {error}")))?;
        }
        if *version > self.version {
            return Err(self.unreadable(event_type, *version));
        }
        (self.decode_lifted)(json).map_err(|error| unfit(error.to_string()))
    }

    fn unreadable(&self, event_type: &str, version: u32) -> DecodeError {
        let lifted: Vec<String> = self.upcasters.keys().map(u32::to_string).collect();
        let problem = match lifted.as_slice() {
            [] => format!("version {} is registered, without upcasters", self.version),
            lifted => format!(
                "version {} is registered, with upcasters from {}",
                self.version,
                lifted.join(", ")
            ),
        };
        DecodeError::UnknownVersion { event_type: event_type.to_owned(), version, problem }
    }
}

impl fmt::Debug for EventRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.types()).finish()
    }
}

fn decode_error(envelope: &Envelope, problem: String) -> DecodeError {
    let Envelope { event_type, version, .. } = envelope;
    DecodeError::Payload { event_type: event_type.clone(), version: *version, problem }
}

fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > TYPE_BYTES_MAX || name.chars().any(char::is_control) {
        let problem =
            format!("the name must have 1 to {TYPE_BYTES_MAX} bytes and no control characters");
        return Err(BusError::invalid(format!("event type `{name}`"), problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use headwater_stream::{EntryId, Fields, StreamName};
    use schemars::JsonSchema;
    use serde::{Deserialize, Serialize};
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    struct Priced {
        cents: u64,
        currency: String,
    }

    impl Event for Priced {
        const TYPE: &'static str = "shop.Priced";
        const VERSION: u32 = 3;
    }

    fn registry() -> EventRegistry {
        EventRegistry::empty()
            .with_upcaster::<Priced>(1, |mut old| {
                let euros = old["euros"].as_u64().ok_or("no euros")?;
                old["cents"] = json!(euros * 100);
                Ok(old)
            })
            .unwrap()
            .with_upcaster::<Priced>(2, |mut old| {
                old["currency"] = json!("EUR");
                Ok(old)
            })
            .unwrap()
    }

    fn envelope(event_type: &str, version: &str, payload: &'static str) -> Envelope {
        let fields = Fields::new([
            ("type", Bytes::copy_from_slice(event_type.as_bytes())),
            ("payload", Bytes::from_static(payload.as_bytes())),
            ("version", Bytes::copy_from_slice(version.as_bytes())),
        ]);
        let stream = StreamName::new("s").unwrap();
        Envelope::from_entry(&stream, EntryId::new(1, 0), &fields).unwrap()
    }

    #[test]
    fn older_versions_are_upcast_step_by_step() {
        let expected = Priced { cents: 700, currency: "EUR".to_owned() };
        for (version, payload) in [
            ("1", r#"{"euros":7}"#),
            ("2", r#"{"cents":700}"#),
            ("3", r#"{"cents":700,"currency":"EUR"}"#),
        ] {
            let read = registry().decode::<Priced>(&envelope(Priced::TYPE, version, payload));
            assert_eq!(*read.unwrap(), expected, "from version {version}");
        }
    }

    #[test]
    fn decode_errors_tell_the_reason() {
        let decode_error = |envelope| registry().decode_any(&envelope).err().unwrap();
        assert!(matches!(
            decode_error(envelope("shop.Other", "1", "{}")),
            DecodeError::UnknownType { event_type } if event_type == "shop.Other"
        ));
        for version in ["0", "4", "4294967295"] {
            let error = decode_error(envelope(Priced::TYPE, version, "{}"));
            assert!(matches!(error, DecodeError::UnknownVersion { .. }), "{version}: {error}");
        }
        for (version, payload) in
            [("3", "{}"), ("3", "nonsense"), ("1", "nonsense"), ("1", "{}"), ("3", "")]
        {
            let error = decode_error(envelope(Priced::TYPE, version, payload));
            assert!(matches!(error, DecodeError::Payload { .. }), "{payload}: {error}");
        }
    }

    #[test]
    fn a_version_without_an_upcaster_is_unknown() {
        let registry = EventRegistry::empty().with_upcaster::<Priced>(2, Ok).unwrap();
        let error = registry.decode_any(&envelope(Priced::TYPE, "1", "{}")).err().unwrap();
        assert!(error.to_string().contains("with upcasters from 2"), "{error}");
    }

    #[test]
    fn a_panic_of_an_upcaster_or_type_is_an_error_of_the_entry() {
        fn touchy<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
            let number = u64::deserialize(deserializer)?;
            assert_ne!(number, 13, "unlucky");
            Ok(number)
        }
        #[derive(Serialize, Deserialize, JsonSchema)]
        struct Touchy {
            #[serde(deserialize_with = "touchy")]
            number: u64,
        }
        impl Event for Touchy {
            const TYPE: &'static str = "tests.Touchy";
            const VERSION: u32 = 2;
        }
        let lift = |old: Json| Ok(json!({ "number": old["old"].as_u64().expect("no old") }));
        let registry = EventRegistry::empty().with_upcaster::<Touchy>(1, lift).unwrap();
        for (version, payload, reason) in [
            ("1", "{}", "no old"),
            ("1", r#"{"old":13}"#, "unlucky"),
            ("2", r#"{"number":13}"#, "unlucky"),
        ] {
            let read = registry.decode_any(&envelope(Touchy::TYPE, version, payload));
            let decode_error = read.err().unwrap();
            assert!(matches!(decode_error, DecodeError::Payload { .. }), "{decode_error}");
            let text = decode_error.to_string();
            assert!(text.contains("panicked") && text.contains(reason), "{text}");
        }
        assert!(registry.decode_any(&envelope(Touchy::TYPE, "1", r#"{"old":12}"#)).is_ok());
    }

    #[test]
    fn type_names_are_unique_and_upcasters_are_validated() {
        #[derive(Serialize, Deserialize, JsonSchema)]
        struct Impostor {}
        impl Event for Impostor {
            const TYPE: &'static str = Priced::TYPE;
        }
        let mut registry = registry();
        assert!(registry.register::<Priced>().is_ok());
        assert!(matches!(registry.register::<Impostor>(), Err(BusError::Invalid { .. })));
        assert!(matches!(registry.check::<Impostor>(), Err(BusError::NotRegistered { .. })));
        for from in [0, 3, 4] {
            assert!(EventRegistry::empty().with_upcaster::<Priced>(from, Ok).is_err(), "{from}");
        }
        assert!(registry.with_upcaster::<Priced>(1, Ok).is_err());
    }

    #[test]
    fn every_registered_type_has_a_schema() {
        let registry = registry();
        let schema = registry.schema(Priced::TYPE).unwrap();
        assert_eq!(schema["properties"]["cents"]["type"], "integer");
        assert_eq!(schema["required"], json!(["cents", "currency"]));
        assert_eq!(registry.schemas().len(), 1);
        assert_eq!(registry.schema("shop.Other"), None);
    }
}
