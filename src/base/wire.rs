//! The fields at the top of an encoded message, one after the other, and changing one, however deep, while everything else
//! stays as it was. Pure.
//!
//! A decode and re-encode would lose what our copy of the message does not know yet, and a field of two bytes costs many
//! times that once it is decoded. Where a message field occurs more than once, its occurrences count as the one message
//! they merge to.

use bytes::{BufMut, Bytes, BytesMut};
use prost::encoding::{
    DecodeContext, WireType, decode_key, decode_varint, encode_key, encode_varint, message, skip_field,
    string,
};
use prost::{DecodeError, Message};

/// A top-level field.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field<'a> {
    pub(crate) tag: u32,
    wire: WireType,
    /// Key and value.
    pub(crate) raw: &'a [u8],
    /// What follows the key: a number, or a length and so many bytes.
    pub(crate) value: &'a [u8],
}

impl<'a> Field<'a> {
    fn next(rest: &mut &'a [u8]) -> Result<Self, DecodeError> {
        let raw = *rest;
        let (tag, wire) = decode_key(rest)?;
        let value = *rest;
        skip_field(wire, tag, rest, DecodeContext::default())?;
        let read = |from: &'a [u8]| &from[..from.len() - rest.len()];
        Ok(Self { tag, wire, raw: read(raw), value: read(value) })
    }

    /// The bytes of a text or of a message; `None` where it is neither.
    pub(crate) fn body(&self) -> Option<&'a [u8]> {
        (self.wire == WireType::LengthDelimited).then(|| {
            let mut body = self.value;
            let _ = decode_varint(&mut body);
            body
        })
    }

    /// The text.
    ///
    /// # Errors
    /// When it is none.
    pub(crate) fn text(&self) -> Result<String, DecodeError> {
        let mut text = String::new();
        string::merge(self.wire, &mut text, &mut { self.value }, DecodeContext::default())?;
        Ok(text)
    }

    /// The message; its bytes are shared with `whole`, of which this is a field.
    ///
    /// # Errors
    /// When it is none.
    pub(crate) fn message<M: Message + Default>(&self, whole: &Bytes) -> Result<M, DecodeError> {
        let mut made = M::default();
        let mut value = whole.slice_ref(self.value);
        message::merge(self.wire, &mut made, &mut value, DecodeContext::default())?;
        Ok(made)
    }
}

/// The top-level fields in order. After an error there is nothing more.
pub(crate) fn each(message: &[u8]) -> impl Iterator<Item = Result<Field<'_>, DecodeError>> {
    let mut rest = message;
    std::iter::from_fn(move || {
        let field = (!rest.is_empty()).then(|| Field::next(&mut rest));
        if matches!(field, Some(Err(_))) {
            rest = &[];
        }
        field
    })
}

/// The texts of a field that may occur any number of times; the whole message is read.
pub(crate) fn texts(message: &[u8], tag: u32) -> impl Iterator<Item = Result<String, DecodeError>> {
    each(message).filter_map(move |field| match field {
        Ok(field) => (field.tag == tag).then(|| field.text()),
        Err(error) => Some(Err(error)),
    })
}

/// Whether a message has so many fields at its top at most; of bytes that are no message the decoder says what is wrong.
/// Millions of empty ones fit into a few MB, and each takes ten times its bytes, or more, once it is decoded.
pub(crate) fn has_few_fields(message: &[u8], most: usize) -> bool {
    each(message).nth(most).is_none()
}

/// Appends a length-delimited field.
pub(crate) fn put(out: &mut impl BufMut, tag: u32, body: &[u8]) {
    encode_key(tag, WireType::LengthDelimited, out);
    encode_varint(body.len() as u64, out);
    out.put_slice(body);
}

/// What the occurrences of message field `tag` merge to; `None` when there is none.
pub(crate) fn merged(message: &Bytes, tag: u32) -> Result<Option<Bytes>, DecodeError> {
    let mut first: Option<Bytes> = None;
    let mut all = BytesMut::new();
    for field in each(message) {
        let field = field?;
        let Some(body) = field.body().filter(|_| field.tag == tag) else { continue };
        match &first {
            None => first = Some(message.slice_ref(body)),
            Some(first) => {
                if all.is_empty() {
                    all.extend_from_slice(first);
                }
                all.extend_from_slice(body);
            }
        }
    }
    Ok(if all.is_empty() { first } else { Some(all.freeze()) })
}

/// The last occurrence of a text or of bytes, which is the one that counts; `None` when there is none.
pub(crate) fn last(message: &[u8], tag: u32) -> Result<Option<&[u8]>, DecodeError> {
    let mut found = None;
    for field in each(message) {
        let field = field?;
        found = field.body().filter(|_| field.tag == tag).or(found);
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
    let put = |out: &mut BytesMut| new.iter().for_each(|body| put(out, *tag, body));
    let mut done = false;
    for field in each(message) {
        let field = field?;
        if field.tag != *tag {
            out.extend_from_slice(field.raw);
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
        assert_eq!((last(&many, 1).unwrap(), last(&many, 3).unwrap()), (Some(b"a".as_slice()), None));
        let mut cut = each(&many[..6]);
        assert!(cut.next().unwrap().is_ok() && cut.next().unwrap().is_ok());
        assert!(cut.next().unwrap().is_err() && cut.next().is_none());
    }

    #[test]
    fn fields_are_counted_no_further_than_need_be() {
        let of = |count: usize, most| has_few_fields(&[0x0a, 0].repeat(count), most);
        assert!(of(0, 0) && of(3, 3) && !of(4, 3) && !of(1, 0));
        // What is wrong with it the decoder says.
        assert!(has_few_fields(&[0x0a, 0, 0x0a], 3) && has_few_fields(&[0xff], 1));
    }

    #[test]
    fn a_value_is_what_it_is_asked_for_or_refused() {
        let whole = Bytes::from_static(b"\x0a\x02ok\x0a\x01\xff\x08\x07");
        let fields: Vec<_> = each(&whole).map(Result::unwrap).collect();
        let texts: Vec<_> = texts(&whole, 1).map(|text| text.map_err(|e| e.to_string())).collect();
        assert_eq!(texts[0].as_deref(), Ok("ok"));
        assert!(texts[1].as_ref().unwrap_err().contains("UTF-8"), "{texts:?}");
        assert!(texts[2].as_ref().unwrap_err().contains("wire type"), "{texts:?}");
        assert_eq!(
            fields.iter().map(Field::body).collect::<Vec<_>>(),
            [Some(&b"ok"[..]), Some(&[0xff]), None]
        );
        assert!(fields[2].message::<Inner>(&whole).is_err());
        let outer = Outer { inner: Some(Inner { a: "x".into(), b: Vec::new() }), ..Outer::default() };
        let whole = Bytes::from(outer.encode_to_vec());
        let field = each(&whole).next().unwrap().unwrap();
        assert_eq!(Some(field.message(&whole).unwrap()), outer.inner);
    }

    proptest! {
        #[test]
        fn any_bytes_are_split_without_loss_or_refused(raw in proptest::collection::vec(any::<u8>(), 0..80)) {
            let raw = Bytes::from(raw);
            if let Ok(fields) = each(&raw).collect::<Result<Vec<_>, _>>() {
                prop_assert_eq!(fields.iter().map(|f| f.raw).collect::<Vec<_>>().concat(), raw.to_vec());
                let made = set(&raw, 77, "new").unwrap();
                prop_assert_eq!(merged(&made, 77).unwrap().unwrap(), "new");
            }
        }
    }
}
