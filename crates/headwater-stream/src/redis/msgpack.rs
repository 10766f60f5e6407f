//! A minimal MessagePack codec: packs a list of byte strings into one script argument.

use bytes::Bytes;

use super::error::ReplyError;
use crate::entry::Fields;

/// Packs the fields of an entry into one list: name, value, name, value.
pub(super) fn fields(fields: &Fields) -> Vec<u8> {
    let mut out = Vec::with_capacity(fields.bytes() + fields.len() * 10 + 8);
    list(&mut out, fields.len() * 2);
    pairs(&mut out, fields);
    out
}

/// Like [`fields`], with the name of the target stream in front.
pub(super) fn target_and_fields(target: &str, fields: &Fields) -> Vec<u8> {
    let mut out = Vec::with_capacity(fields.bytes() + fields.len() * 10 + target.len() + 13);
    list(&mut out, fields.len() * 2 + 1);
    text(&mut out, target.as_bytes());
    pairs(&mut out, fields);
    out
}

/// Unpacks the output of [`target_and_fields`].
pub(super) fn read_target_and_fields(packed: &[u8]) -> Result<(String, Fields), ReplyError> {
    let mut rest = packed;
    let read = || -> Option<(String, Fields)> {
        let values = match take_one(&mut rest)? {
            head @ 0x90..=0x9f => usize::from(head & 0x0f),
            0xdc => take_number(&mut rest, 2)?,
            0xdd => take_number(&mut rest, 4)?,
            _ => return None,
        };
        let target = String::from_utf8(take_text(&mut rest)?.to_vec()).ok()?;
        let pairs = (0..values.checked_sub(1)? / 2)
            .map(|_| {
                let name = Bytes::copy_from_slice(take_text(&mut rest)?);
                Some((name, Bytes::copy_from_slice(take_text(&mut rest)?)))
            })
            .collect::<Option<Vec<_>>>()?;
        Some((target, Fields::new(pairs)))
    };
    let mut read = read;
    read().ok_or_else(|| ReplyError::unexpected("invalid delayed entry"))
}

fn pairs(out: &mut Vec<u8>, fields: &Fields) {
    for (name, value) in fields.slices() {
        text(out, name);
        text(out, value);
    }
}

fn list(out: &mut Vec<u8>, values: usize) {
    match values {
        0..16 => out.push(0x90 | values as u8),
        16..=0xffff => {
            out.push(0xdc);
            out.extend_from_slice(&(values as u16).to_be_bytes());
        }
        _ => {
            out.push(0xdd);
            out.extend_from_slice(&(values as u32).to_be_bytes());
        }
    }
}

fn text(out: &mut Vec<u8>, bytes: &[u8]) {
    match bytes.len() {
        length @ 0..32 => out.push(0xa0 | length as u8),
        length @ 32..=0xffff => {
            out.push(0xda);
            out.extend_from_slice(&(length as u16).to_be_bytes());
        }
        length => {
            out.push(0xdb);
            out.extend_from_slice(&(length as u32).to_be_bytes());
        }
    }
    out.extend_from_slice(bytes);
}

fn take_text<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = match take_one(rest)? {
        head @ 0xa0..=0xbf => usize::from(head & 0x1f),
        0xd9 => take_number(rest, 1)?,
        0xda => take_number(rest, 2)?,
        0xdb => take_number(rest, 4)?,
        _ => return None,
    };
    let (text, tail) = rest.split_at_checked(length)?;
    *rest = tail;
    Some(text)
}

fn take_one(rest: &mut &[u8]) -> Option<u8> {
    let (first, tail) = rest.split_first()?;
    *rest = tail;
    Some(*first)
}

fn take_number(rest: &mut &[u8], bytes: usize) -> Option<usize> {
    let (number, tail) = rest.split_at_checked(bytes)?;
    *rest = tail;
    Some(number.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_every_size_round_trip() {
        for size in [0, 1, 31, 32, 255, 256, 65_535, 65_536] {
            let value = vec![0xff_u8; size];
            for count in [1, 7, 8, 256] {
                let fields = Fields::new((0..count).map(|n| (n.to_string(), value.clone())));
                let packed = target_and_fields("orders", &fields);
                let read = read_target_and_fields(&packed).unwrap();
                assert_eq!(read, ("orders".to_owned(), fields));
            }
        }
    }

    #[test]
    fn invalid_bytes_are_rejected() {
        let fields = Fields::new([("a", "b")]);
        let packed = target_and_fields("orders", &fields);
        for length in 0..packed.len() {
            assert!(read_target_and_fields(&packed[..length]).is_err());
        }
        assert!(read_target_and_fields(b"\xc0").is_err());
    }
}
