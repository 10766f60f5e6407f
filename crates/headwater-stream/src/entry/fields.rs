//! The fields of an entry: names and values whose bytes nobody changes.
//!
//! Upstream: callers make them one by one, backends often have them as one piece of memory. Such a piece is taken apart
//! when somebody asks for its parts: most entries are read by whoever needs a few values, and by nobody else.

use std::fmt;
use std::slice;
use std::sync::Arc;

use bytes::Bytes;

use super::EntrySize;
use super::packed::{Packed, Parts, put_text, text_bytes};

/// More than this is shared, not copied.
const COPIED_BYTES_MAX: usize = 16 * 1024;

/// A name and its value, of one entry alone.
pub type Own<'a> = (&'static str, &'a Bytes);

/// The fields of an entry, in the order they were written. Clones share the bytes.
#[derive(Clone)]
pub struct Fields(Shape);

#[derive(Clone)]
enum Shape {
    Pairs(Arc<[(Bytes, Bytes)]>),
    Packed(Arc<Packed>),
}

impl Fields {
    /// Fields from pairs of name and value.
    pub fn new<N: Into<Bytes>, V: Into<Bytes>>(pairs: impl IntoIterator<Item = (N, V)>) -> Self {
        let pairs = pairs.into_iter().map(|(name, value)| (name.into(), value.into()));
        Self(Shape::Pairs(pairs.collect()))
    }

    /// Fields `before` and `after` those that many entries have in common. Small ones are copied into one piece of memory.
    pub fn with_common(before: &[Own<'_>], common: &Self, after: &[Own<'_>]) -> Self {
        let own = || before.iter().chain(after);
        let own_bytes: usize = own().map(|(name, value)| name.len() + value.len()).sum();
        let size = EntrySize {
            fields: before.len() + common.len() + after.len(),
            bytes: own_bytes + common.bytes(),
        };
        if size.bytes > COPIED_BYTES_MAX {
            let shared = |(name, value): &Own<'_>| {
                (Bytes::from_static(name.as_bytes()), Bytes::clone(value))
            };
            let common = common.iter().cloned();
            let (before, after) = (before.iter().map(shared), after.iter().map(shared));
            return Self::new(before.chain(common).chain(after));
        }
        let room = own().map(|(name, value)| text_bytes(name.len()) + text_bytes(value.len()));
        let mut bytes = Vec::with_capacity(room.sum::<usize>() + common.packed_bytes());
        let put = |bytes: &mut Vec<u8>, own: &[Own<'_>]| {
            for (name, value) in own {
                put_text(bytes, name.as_bytes());
                put_text(bytes, value);
            }
        };
        put(&mut bytes, before);
        common.put_into(&mut bytes);
        put(&mut bytes, after);
        Self::packed(bytes.into(), size)
    }

    /// Fields of this size as they lie in memory.
    pub(crate) fn packed(bytes: Bytes, size: EntrySize) -> Self {
        Self(Shape::Packed(Arc::new(Packed::new(bytes, size))))
    }

    /// Adds them to packed memory.
    pub(crate) fn put_into(&self, out: &mut Vec<u8>) {
        match &self.0 {
            Shape::Packed(packed) => out.extend_from_slice(&packed.bytes),
            Shape::Pairs(pairs) => pairs.iter().for_each(|(name, value)| {
                put_text(out, name);
                put_text(out, value);
            }),
        }
    }

    /// How many bytes they take in packed memory.
    pub(crate) fn packed_bytes(&self) -> usize {
        match &self.0 {
            Shape::Packed(packed) => packed.bytes.len(),
            Shape::Pairs(pairs) => pairs
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

    /// The pairs of name and value, in order.
    pub fn iter(&self) -> slice::Iter<'_, (Bytes, Bytes)> {
        match &self.0 {
            Shape::Pairs(pairs) => pairs.iter(),
            Shape::Packed(packed) => packed.pairs().iter(),
        }
    }

    /// The pairs of name and value as they lie there, in order. Costs less than [`iter`](Self::iter) for whoever wants
    /// few of them, or wants none to keep; see [`share`](Self::share).
    pub fn slices(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let mut slices = match &self.0 {
            Shape::Pairs(pairs) => Slices::Pairs(pairs.iter()),
            Shape::Packed(packed) => Slices::Parts(packed.parts()),
        };
        std::iter::from_fn(move || match &mut slices {
            Slices::Pairs(pairs) => pairs.next().map(|(name, value)| (&name[..], &value[..])),
            Slices::Parts(parts) => Some((parts.next()?, parts.next()?)),
        })
    }

    /// A name or value of [`slices`](Self::slices), to keep.
    pub fn share(&self, part: &[u8]) -> Bytes {
        let is_part = |bytes: &Bytes| bytes.as_ptr() == part.as_ptr() && bytes.len() == part.len();
        match &self.0 {
            Shape::Packed(packed) if packed.holds(part) => packed.bytes.slice_ref(part),
            Shape::Packed(_) => Bytes::copy_from_slice(part),
            Shape::Pairs(pairs) => {
                let mut all = pairs.iter().flat_map(|(name, value)| [name, value]);
                all.find(|bytes| is_part(bytes))
                    .map_or_else(|| Bytes::copy_from_slice(part), Bytes::clone)
            }
        }
    }

    /// How many fields there are, and their bytes.
    pub fn size(&self) -> EntrySize {
        EntrySize { fields: self.len(), bytes: self.bytes() }
    }

    /// How many fields there are.
    pub fn len(&self) -> usize {
        match &self.0 {
            Shape::Pairs(pairs) => pairs.len(),
            Shape::Packed(packed) => packed.size.fields,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of all names and values together.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Shape::Pairs(pairs) => pairs.iter().map(|(name, value)| name.len() + value.len()).sum(),
            Shape::Packed(packed) => packed.size.bytes,
        }
    }
}

/// Names and values that are being looked at.
enum Slices<'a> {
    Pairs(slice::Iter<'a, (Bytes, Bytes)>),
    Parts(Parts<'a>),
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
    fn fields_in_one_piece_are_the_same_as_one_by_one() {
        let one_by_one = Fields::new([("a", "xy"), ("", "end"), ("topic", "0123456789")]);
        let (first, second) = (Bytes::from_static(b"xy"), Bytes::from_static(b"end"));
        let common = Fields::new([("topic", "0123456789")]);
        let packed = Fields::with_common(&[("a", &first), ("", &second)], &common, &[]);
        let second = Fields::new([("", "end")]);
        let topic = Bytes::from_static(b"0123456789");
        let around = Fields::with_common(&[("a", &first)], &second, &[("topic", &topic)]);
        let twice_packed = Fields::with_common(&[], &packed, &[]);
        assert!(matches!(twice_packed.0, Shape::Packed(_)));
        for fields in [&packed, &around, &twice_packed, &one_by_one] {
            assert_eq!((fields, fields.len(), fields.bytes()), (&one_by_one, 3, 21));
            assert_eq!(format!("{fields:?}"), format!("{one_by_one:?}"));
            assert!(fields.iter().eq(one_by_one.iter()));
            let mut written = Vec::new();
            fields.put_into(&mut written);
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
        let fields = Fields::with_common(&[("payload", &value)], &common, &[]);
        assert_eq!(fields.get("payload").unwrap().as_ptr(), value.as_ptr());
        assert_eq!((fields.get("topic").unwrap(), fields.len()), (&Bytes::from("orders"), 2));
    }
}
