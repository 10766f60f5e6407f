//! The fields of an entry: names and values as immutable bytes.
//!
//! Callers build fields as pairs; backends often have them as one block of memory. A block is split into
//! pairs only on demand, because most readers need only a few values.

use std::fmt;
use std::slice;
use std::sync::Arc;

use bytes::Bytes;

use super::EntrySize;
use super::packed::{PackedFields, PackedParts, put_text, text_bytes};

/// Larger values are shared, not copied.
const COPIED_BYTES_MAX: usize = 16 * 1024;

/// A field of one entry: its name and value.
pub type FieldRef<'a> = (&'static str, &'a Bytes);

/// The fields of an entry, in the order they were written. Clones share the bytes.
#[derive(Clone)]
pub struct Fields(FieldsRepr);

#[derive(Clone)]
enum FieldsRepr {
    Pairs(Arc<[(Bytes, Bytes)]>),
    Packed(Arc<PackedFields>),
}

impl Fields {
    /// Fields from name-value pairs.
    pub fn new<N: Into<Bytes>, V: Into<Bytes>>(pairs: impl IntoIterator<Item = (N, V)>) -> Self {
        let pairs = pairs.into_iter().map(|(name, value)| (name.into(), value.into()));
        Self(FieldsRepr::Pairs(pairs.collect()))
    }

    /// Fields `before` and `after` the ones shared by many entries. Small fields are copied into one block of
    /// memory.
    pub fn with_shared(before: &[FieldRef<'_>], common: &Self, after: &[FieldRef<'_>]) -> Self {
        let own = || before.iter().chain(after);
        let own_bytes: usize = own().map(|(name, value)| name.len() + value.len()).sum();
        let size = EntrySize {
            fields: before.len() + common.len() + after.len(),
            bytes: own_bytes + common.bytes(),
        };
        if size.bytes > COPIED_BYTES_MAX {
            let shared = |(name, value): &FieldRef<'_>| {
                (Bytes::from_static(name.as_bytes()), Bytes::clone(value))
            };
            let common = common.iter().cloned();
            let (before, after) = (before.iter().map(shared), after.iter().map(shared));
            return Self::new(before.chain(common).chain(after));
        }
        let room = own().map(|(name, value)| text_bytes(name.len()) + text_bytes(value.len()));
        let mut bytes = Vec::with_capacity(room.sum::<usize>() + common.packed_bytes());
        let put = |bytes: &mut Vec<u8>, own: &[FieldRef<'_>]| {
            for (name, value) in own {
                put_text(bytes, name.as_bytes());
                put_text(bytes, value);
            }
        };
        put(&mut bytes, before);
        common.encode_into(&mut bytes);
        put(&mut bytes, after);
        Self::packed(bytes.into(), size)
    }

    /// Fields in packed form.
    pub(crate) fn packed(bytes: Bytes, size: EntrySize) -> Self {
        Self(FieldsRepr::Packed(Arc::new(PackedFields::new(bytes, size))))
    }

    /// Appends the fields in packed form.
    pub(crate) fn encode_into(&self, out: &mut Vec<u8>) {
        match &self.0 {
            FieldsRepr::Packed(packed) => out.extend_from_slice(&packed.bytes),
            FieldsRepr::Pairs(pairs) => pairs.iter().for_each(|(name, value)| {
                put_text(out, name);
                put_text(out, value);
            }),
        }
    }

    /// Size in packed form.
    pub(crate) fn packed_bytes(&self) -> usize {
        match &self.0 {
            FieldsRepr::Packed(packed) => packed.bytes.len(),
            FieldsRepr::Pairs(pairs) => pairs
                .iter()
                .map(|(name, value)| text_bytes(name.len()) + text_bytes(value.len()))
                .sum(),
        }
    }

    /// The value of the first field with this name.
    pub fn get(&self, name: impl AsRef<[u8]>) -> Option<&Bytes> {
        let name = name.as_ref();
        self.iter().find(|(field, _)| field == name).map(|(_, value)| value)
    }

    /// Name-value pairs, in order.
    pub fn iter(&self) -> slice::Iter<'_, (Bytes, Bytes)> {
        match &self.0 {
            FieldsRepr::Pairs(pairs) => pairs.iter(),
            FieldsRepr::Packed(packed) => packed.pairs().iter(),
        }
    }

    /// Borrowed name-value pairs, in order. Cheaper than [`iter`](Self::iter) if you need only a few; use
    /// [`share`](Self::share) to keep one.
    pub fn slices(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let mut slices = match &self.0 {
            FieldsRepr::Pairs(pairs) => Slices::Pairs(pairs.iter()),
            FieldsRepr::Packed(packed) => Slices::Parts(packed.parts()),
        };
        std::iter::from_fn(move || match &mut slices {
            Slices::Pairs(pairs) => pairs.next().map(|(name, value)| (&name[..], &value[..])),
            Slices::Parts(parts) => Some((parts.next()?, parts.next()?)),
        })
    }

    /// A name or value from [`slices`](Self::slices) as `Bytes`, without a copy where possible.
    pub fn share(&self, part: &[u8]) -> Bytes {
        let is_part = |bytes: &Bytes| bytes.as_ptr() == part.as_ptr() && bytes.len() == part.len();
        match &self.0 {
            FieldsRepr::Packed(packed) if packed.holds(part) => packed.bytes.slice_ref(part),
            FieldsRepr::Packed(_) => Bytes::copy_from_slice(part),
            FieldsRepr::Pairs(pairs) => {
                let mut all = pairs.iter().flat_map(|(name, value)| [name, value]);
                all.find(|bytes| is_part(bytes))
                    .map_or_else(|| Bytes::copy_from_slice(part), Bytes::clone)
            }
        }
    }

    /// Number of fields and their bytes.
    pub fn size(&self) -> EntrySize {
        EntrySize { fields: self.len(), bytes: self.bytes() }
    }

    /// Number of fields.
    pub fn len(&self) -> usize {
        match &self.0 {
            FieldsRepr::Pairs(pairs) => pairs.len(),
            FieldsRepr::Packed(packed) => packed.size.fields,
        }
    }

    /// Whether there are no fields.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Total bytes of all names and values.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            FieldsRepr::Pairs(pairs) => {
                pairs.iter().map(|(name, value)| name.len() + value.len()).sum()
            }
            FieldsRepr::Packed(packed) => packed.size.bytes,
        }
    }
}

/// Iterator state of `slices`.
enum Slices<'a> {
    Pairs(slice::Iter<'a, (Bytes, Bytes)>),
    Parts(PackedParts<'a>),
}

/// No fields.
impl Default for Fields {
    fn default() -> Self {
        Self::new::<Bytes, Bytes>([])
    }
}

impl PartialEq for Fields {
    fn eq(&self, other: &Self) -> bool {
        self.slices().eq(other.slices())
    }
}

impl Eq for Fields {}

impl<'a> IntoIterator for &'a Fields {
    type Item = &'a (Bytes, Bytes);
    type IntoIter = slice::Iter<'a, (Bytes, Bytes)>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Debug for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(name, value)| (name, value))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_fields_equal_fields_built_from_pairs() {
        let one_by_one = Fields::new([("a", "xy"), ("", "end"), ("topic", "0123456789")]);
        let (first, second) = (Bytes::from_static(b"xy"), Bytes::from_static(b"end"));
        let common = Fields::new([("topic", "0123456789")]);
        let packed = Fields::with_shared(&[("a", &first), ("", &second)], &common, &[]);
        let second = Fields::new([("", "end")]);
        let topic = Bytes::from_static(b"0123456789");
        let around = Fields::with_shared(&[("a", &first)], &second, &[("topic", &topic)]);
        let twice_packed = Fields::with_shared(&[], &packed, &[]);
        assert!(matches!(twice_packed.0, FieldsRepr::Packed(_)));
        for fields in [&packed, &around, &twice_packed, &one_by_one] {
            assert_eq!((fields, fields.len(), fields.bytes()), (&one_by_one, 3, 21));
            assert_eq!(format!("{fields:?}"), format!("{one_by_one:?}"));
            assert!(fields.iter().eq(one_by_one.iter()));
            let mut written = Vec::new();
            fields.encode_into(&mut written);
            assert_eq!(written.len(), fields.packed_bytes());
            assert_eq!(Fields::packed(written.into(), fields.size()), one_by_one);
            assert_eq!(fields.get("a").unwrap(), "xy");
            assert_eq!(fields.get("b"), None);
            let (_, value) = fields.slices().next().unwrap();
            let kept = fields.share(value);
            assert_eq!((kept.as_ptr(), &kept[..]), (value.as_ptr(), &b"xy"[..]));
            assert_eq!(fields.share(b"elsewhere"), "elsewhere");
        }
        assert_ne!(packed, Fields::new([("a", "xy")]));
    }

    #[test]
    fn large_values_are_shared_not_copied() {
        let common = Fields::new([("topic", "orders")]);
        let value = Bytes::from(vec![b'x'; COPIED_BYTES_MAX]);
        let fields = Fields::with_shared(&[("payload", &value)], &common, &[]);
        assert_eq!(fields.get("payload").unwrap().as_ptr(), value.as_ptr());
        assert_eq!((fields.get("topic").unwrap(), fields.len()), (&Bytes::from("orders"), 2));
    }
}
