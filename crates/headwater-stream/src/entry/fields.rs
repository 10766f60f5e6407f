//! The fields of an entry: names and values whose bytes nobody changes.
//!
//! Upstream: callers make them one by one, backends often have them as one piece of memory. Such a piece is taken apart
//! when somebody asks for its parts: most entries are read by whoever needs a few values, and by nobody else.

use std::fmt;
use std::ops::Range;
use std::slice;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

/// The fields of an entry, in the order they were written. Clones share the bytes.
#[derive(Clone)]
pub struct Fields(Shape);

#[derive(Clone)]
enum Shape {
    Pairs(Arc<[(Bytes, Bytes)]>),
    #[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "servers write them so"))]
    Packed(Arc<Packed>),
}

/// Names and values in turn, in one piece of memory.
struct Packed {
    bytes: Bytes,
    fields: usize,
    next: NextPart,
    pairs: OnceLock<Box<[(Bytes, Bytes)]>>,
}

/// Finds the first part of what is left: where it lies, and where the one after it begins.
pub(crate) type NextPart = fn(&[u8]) -> Option<(Range<usize>, usize)>;

impl Fields {
    /// Fields from pairs of name and value.
    pub fn new<N: Into<Bytes>, V: Into<Bytes>>(pairs: impl IntoIterator<Item = (N, V)>) -> Self {
        let pairs = pairs.into_iter().map(|(name, value)| (name.into(), value.into()));
        Self(Shape::Pairs(pairs.collect()))
    }

    /// So many fields as they lie in memory; `next` must find a name and a value for each.
    #[cfg(feature = "redis")]
    pub(crate) fn packed(bytes: Bytes, fields: usize, next: NextPart) -> Self {
        Self(Shape::Packed(Arc::new(Packed { bytes, fields, next, pairs: OnceLock::new() })))
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

    /// How many fields there are.
    pub fn len(&self) -> usize {
        match &self.0 {
            Shape::Pairs(pairs) => pairs.len(),
            Shape::Packed(packed) => packed.fields,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of all names and values together.
    pub fn bytes(&self) -> usize {
        self.slices().map(|(name, value)| name.len() + value.len()).sum()
    }
}

/// Names and values that are being looked at.
enum Slices<'a> {
    Pairs(slice::Iter<'a, (Bytes, Bytes)>),
    Parts(Parts<'a>),
}

struct Parts<'a> {
    rest: &'a [u8],
    next: NextPart,
}

impl Packed {
    fn parts(&self) -> Parts<'_> {
        Parts { rest: &self.bytes, next: self.next }
    }

    fn pairs(&self) -> &[(Bytes, Bytes)] {
        self.pairs.get_or_init(|| {
            let mut parts = self.parts().map(|part| self.bytes.slice_ref(part));
            let mut pairs = Vec::with_capacity(self.fields);
            while let (Some(name), Some(value)) = (parts.next(), parts.next()) {
                pairs.push((name, value));
            }
            pairs.into()
        })
    }

    /// Whether these bytes lie in this memory.
    fn holds(&self, part: &[u8]) -> bool {
        let (memory, part) = (self.bytes.as_ptr_range(), part.as_ptr_range());
        memory.start <= part.start && part.end <= memory.end
    }
}

impl<'a> Iterator for Parts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (range, after) = (self.next)(self.rest)?;
        let part = self.rest.get(range)?;
        self.rest = self.rest.get(after..).unwrap_or_default();
        Some(part)
    }
}

/// Fields from an array: written once, where they stay.
impl<const N: usize> From<[(Bytes, Bytes); N]> for Fields {
    fn from(pairs: [(Bytes, Bytes); N]) -> Self {
        Self(Shape::Pairs(Arc::new(pairs)))
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

#[cfg(all(test, feature = "redis"))]
mod tests {
    use super::*;

    /// Each part is a letter and a digit that says how long it is.
    fn next(rest: &[u8]) -> Option<(Range<usize>, usize)> {
        let length = usize::from(rest.first()?.wrapping_sub(b'0'));
        Some((1..1 + length, 1 + length))
    }

    #[test]
    fn fields_in_one_piece_are_the_same_as_one_by_one() {
        let packed = Fields::packed(Bytes::from_static(b"1a2xy03end"), 2, next);
        let pairs = Fields::new([("a", "xy"), ("", "end")]);
        assert_eq!((&packed, packed.len(), packed.bytes()), (&pairs, 2, 6));
        assert_eq!(format!("{packed:?}"), format!("{pairs:?}"));
        assert!(packed.iter().eq(pairs.iter()));
        for fields in [&packed, &pairs] {
            assert_eq!(fields.get("a").unwrap(), "xy");
            assert_eq!(fields.get("b"), None);
            let (_, value) = fields.slices().next().unwrap();
            let kept = fields.share(value);
            assert_eq!((kept.as_ptr(), &kept[..]), (value.as_ptr(), &b"xy"[..]));
            assert_eq!(fields.share(b"elsewhere"), "elsewhere");
        }
        assert_ne!(packed, Fields::new([("a", "xy")]));
    }
}
