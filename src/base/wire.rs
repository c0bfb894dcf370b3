//! Changing a field of an encoded message, however deep, while everything else stays as it was. Pure.
//!
//! A decode and re-encode would lose what our copy of the message does not know yet. Where a message
//! field occurs more than once, its occurrences count as the one message they merge to.

use bytes::{Buf, Bytes, BytesMut};
use prost::DecodeError;
use prost::encoding::{DecodeContext, WireType, decode_key, encode_key, encode_varint, skip_field};

/// A top-level field.
pub(crate) struct Field {
    pub(crate) tag: u32,
    /// Key and value.
    pub(crate) raw: Bytes,
    /// The value, where it is length-delimited.
    pub(crate) body: Option<Bytes>,
}

/// The top-level fields in order.
pub(crate) fn fields(message: &Bytes) -> Result<Vec<Field>, DecodeError> {
    each(message).collect()
}

/// The top-level fields one after the other: a field of two bytes costs many times that where all are held. After an
/// error there is nothing more.
pub(crate) fn each(message: &Bytes) -> impl Iterator<Item = Result<Field, DecodeError>> + use<> {
    let mut rest = message.clone();
    std::iter::from_fn(move || {
        let field = rest.has_remaining().then(|| next(&mut rest));
        if matches!(field, Some(Err(_))) {
            rest.clear();
        }
        field
    })
}

fn next(rest: &mut Bytes) -> Result<Field, DecodeError> {
    let before = rest.clone();
    let (tag, wire) = decode_key(rest)?;
    let start = rest.clone();
    skip_field(wire, tag, rest, DecodeContext::default())?;
    let body = (wire == WireType::LengthDelimited).then(|| {
        let mut value = start.slice(..start.len() - rest.len());
        let _ = prost::encoding::decode_varint(&mut value);
        value
    });
    Ok(Field { tag, raw: before.slice(..before.len() - rest.len()), body })
}

/// What the occurrences of message field `tag` merge to; `None` when there is none.
pub(crate) fn merged(message: &Bytes, tag: u32) -> Result<Option<Bytes>, DecodeError> {
    let mut first: Option<Bytes> = None;
    let mut all = BytesMut::new();
    for field in each(message) {
        let field = field?;
        let Some(body) = field.body.filter(|_| field.tag == tag) else { continue };
        match &first {
            None => first = Some(body),
            Some(first) => {
                if all.is_empty() {
                    all.extend_from_slice(first);
                }
                all.extend_from_slice(&body);
            }
        }
    }
    Ok(if all.is_empty() { first } else { Some(all.freeze()) })
}

/// The last occurrence of a text or of bytes, which is the one that counts; `None` when there is none.
pub(crate) fn last(message: &Bytes, tag: u32) -> Result<Option<Bytes>, DecodeError> {
    let mut found = None;
    for field in each(message) {
        let field = field?;
        found = field.body.filter(|_| field.tag == tag).or(found);
    }
    Ok(found)
}

/// Sets the length-delimited field at the end of `path` (tags from the outside in) to what `change` makes
/// of it; `None` takes it away.
pub(crate) fn edit(
    message: &Bytes,
    path: &[u32],
    change: &mut dyn FnMut(Option<Bytes>) -> Result<Option<Bytes>, DecodeError>,
) -> Result<Bytes, DecodeError> {
    let Some((tag, inner)) = path.split_first() else { return Ok(message.clone()) };
    let old = merged(message, *tag)?;
    let new =
        if inner.is_empty() { change(old)? } else { Some(edit(&old.unwrap_or_default(), inner, change)?) };
    let mut out = BytesMut::with_capacity(message.len());
    let put = |out: &mut BytesMut| {
        if let Some(body) = &new {
            encode_key(*tag, WireType::LengthDelimited, out);
            encode_varint(body.len() as u64, out);
            out.extend_from_slice(body);
        }
    };
    let mut done = false;
    for field in fields(message)? {
        if field.tag != *tag {
            out.extend_from_slice(&field.raw);
        } else if !done {
            done = true;
            put(&mut out);
        }
    }
    if !done {
        put(&mut out);
    }
    Ok(out.freeze())
}

/// Sets a length-delimited field of the message itself.
pub(crate) fn set(message: &Bytes, tag: u32, body: impl Into<Bytes>) -> Result<Bytes, DecodeError> {
    let body = body.into();
    edit(message, &[tag], &mut |_| Ok(Some(body.clone())))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    #[derive(Clone, PartialEq, Message)]
    struct Inner {
        #[prost(string, tag = "1")]
        a: String,
        #[prost(string, repeated, tag = "2")]
        b: Vec<String>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct Outer {
        #[prost(uint64, tag = "1")]
        n: u64,
        #[prost(message, optional, tag = "2")]
        inner: Option<Inner>,
        #[prost(string, tag = "3")]
        tail: String,
    }

    #[test]
    fn occurrences_merge_and_the_rest_stays() {
        let one = Outer { n: 7, inner: Some(Inner { a: "x".into(), b: vec!["1".into()] }), tail: "t".into() };
        let two = Outer { inner: Some(Inner { a: "y".into(), b: vec!["2".into()] }), ..Outer::default() };
        let unknown = [0xc2, 0x3e, 0x03, b'a', b'b', b'c'];
        let raw: Bytes = [one.encode_to_vec(), unknown.to_vec(), two.encode_to_vec()].concat().into();
        let made = edit(&raw, &[2, 1], &mut |old| {
            assert_eq!(old.unwrap(), "xy", "the concatenation; strings are set whole anyway");
            Ok(Some(Bytes::from_static(b"z")))
        })
        .unwrap();
        let read = Outer::decode(made.clone()).unwrap();
        let inner = read.inner.unwrap();
        assert_eq!((inner.a.as_str(), inner.b), ("z", vec!["1".to_owned(), "2".to_owned()]));
        assert_eq!((read.n, read.tail.as_str()), (7, "t"));
        assert!(made.windows(6).any(|w| w == unknown));
        assert_eq!(Outer::decode(edit(&raw, &[2], &mut |_| Ok(None)).unwrap()).unwrap().inner, None);
    }

    // In the square of their number these would take hours.
    #[test]
    fn a_field_that_occurs_a_million_times_is_read_in_one_go() {
        let many = Bytes::from(b"\x0a\x01a\x12\x00".repeat(1_000_000));
        assert_eq!(merged(&many, 1).unwrap().unwrap(), "a".repeat(1_000_000));
        assert_eq!(merged(&many, 2).unwrap().unwrap(), "");
        assert_eq!((last(&many, 1).unwrap().unwrap(), last(&many, 3).unwrap()), ("a".into(), None));
        let mut cut = each(&many.slice(..6));
        assert!(cut.next().unwrap().is_ok() && cut.next().unwrap().is_ok());
        assert!(cut.next().unwrap().is_err() && cut.next().is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_are_split_without_loss_or_refused(raw in proptest::collection::vec(any::<u8>(), 0..80)) {
            let raw = Bytes::from(raw);
            if let Ok(fields) = fields(&raw) {
                prop_assert_eq!(fields.iter().map(|f| &f.raw[..]).collect::<Vec<_>>().concat(), raw.to_vec());
                let made = set(&raw, 77, "new").unwrap();
                prop_assert_eq!(merged(&made, 77).unwrap().unwrap(), "new");
            }
        }
    }
}
