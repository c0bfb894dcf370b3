use super::*;

fn data() -> Value {
    let json = serde_json::json!({
        "name": "web", "n": 3, "off": false, "none": null, "half": 0.5, "big": 1e21,
        "list": ["a", "b", "c"], "map": {"k": "v", "l": "w"}, "numbers": [1, 2],
    });
    let Value::Map(mut members) = Value::from_json(&json) else { unreachable!() };
    let record = Record {
        kind: "*Config",
        members: [("Port".to_owned(), Value::Int(15000))].into(),
        json: serde_json::json!({"port": 15000, "q": "<&>"}),
        open: false,
        text: None,
    };
    members.insert("config".into(), Value::Record(Box::new(record)));
    Value::Map(members)
}

fn shown(template: &str) -> Result<String, String> {
    render(template, &data(), &[("HOST".to_owned(), "h1".to_owned())].into()).map_err(|e| e.to_string())
}

#[test]
fn renders_as_go_does() {
    for (template, wanted) in [
        ("plain", "plain"),
        ("{{ .name }}", "web"),
        ("{{.n}} {{.off}} {{.half}} {{.big}} {{.list}} {{.map}}", "3 false 0.5 1e+21 [a b c] map[k:v l:w]"),
        (
            "{{ .missing }}|{{ .none }}|{{ .missing.x.y }}|{{ .map.x.y }}",
            "<no value>|<no value>|<no value>|<no value>",
        ),
        ("a {{- .name -}} b", "awebb"),
        ("a {{- /* a\ncomment */ -}} b", "ab"),
        ("{{/* x */}}y", "y"),
        ("{{ if .off }}a{{ else if .name }}b{{ else }}c{{ end }}", "b"),
        ("{{ if and .name (not .off) (gt .n 2) }}yes{{ end }}", "yes"),
        ("{{ with .map }}{{ .k }}{{ else }}none{{ end }}", "v"),
        ("{{ with .missing }}x{{ else with .name }}{{ . }}{{ end }}", "web"),
        ("{{ range .list }}{{ . }},{{ end }}", "a,b,c,"),
        ("{{ range $i, $v := .list }}{{ if $i }},{{ end }}\"{{ $v }}\"{{ end }}", "\"a\",\"b\",\"c\""),
        ("{{ range $k, $v := .map }}{{ $k }}={{ $v }};{{ end }}", "k=v;l=w;"),
        ("{{ range .missing }}x{{ else }}empty{{ end }}", "empty"),
        ("{{ range .list }}{{ if eq . \"b\" }}{{ continue }}{{ end }}{{ . }}{{ end }}", "ac"),
        ("{{ range .list }}{{ if eq . \"b\" }}{{ break }}{{ end }}{{ . }}{{ end }}", "a"),
        ("{{ range 3 }}{{ . }}{{ end }}", "012"),
        ("{{ $x := 1 }}{{ range .list }}{{ $x = add $x 1 }}{{ end }}{{ $x }}", "4"),
        ("{{ $x := .map }}{{ $x.k }}{{ (index $.list 1) }}", "vb"),
        ("{{ define \"t\" }}<{{ . }}>{{ end }}{{ template \"t\" .name }}", "<web>"),
        ("{{ block \"b\" .n }}{{ . }}{{ end }}", "3"),
        ("{{ .name | printf \"%s-%d-%q-%v\" \"a\" 2 \"x\\\"\" }}", "a-2-\"x\\\"\"-web"),
        ("{{ printf \"%5d|%-5s|%05d|%.1f|%x\" 3 \"a\" 42 1.25 255 }}", "    3|a    |00042|1.2|ff"),
        ("{{ printf \"%e|%U|%X|% d|%#v\" 1234.5 233 \"hi\" 3 \"a\" }}", "1.234500e+03|U+00E9|6869| 3|\"a\""),
        (
            "{{ 1e6 }} {{ 123456.0 }} {{ 1234567.5 }} {{ 0.0001 }} {{ 0.00001 }}",
            "1e+06 123456 1.2345675e+06 0.0001 1e-05",
        ),
        (
            "{{ js .none }} {{ printf \"%s %v %T\" .missing .missing .missing }}",
            "\\u003Cno value\\u003E %!s(<nil>) <nil> <nil>",
        ),
        ("{{ $x := 1 }}{{ range $x = .missing }}{{ end }}{{ $x }}", "<no value>"),
        ("{{ printf \"%[2]s %[1]s %[3]s\" \"a\" \"b\" }}", "b a %!s(BADINDEX)"),
        ("{{ printf \"%d %s\" \"a\" }}", "%!d(string=a) %!s(MISSING)"),
        ("{{ print 1 2 \"a\" \"b\" 3 }}", "1 2ab3"),
        ("{{ len .list }}{{ index .list 2 }}{{ index .map \"zz\" }}", "3c"),
        ("{{ slice .name 1 }}{{ slice .name 0 1 }}", "ebw"),
        ("{{ .config.Port }}{{ .config.GetPort }}", "1500015000"),
        ("{{ toJSON .config }}{{ toJSON .missing }}", "{\"port\":15000,\"q\":\"\\u003c\\u0026\\u003e\"}{}"),
        ("{{ toJSON .map }}", "{\"k\":\"v\",\"l\":\"w\"}"),
        ("{{ js \"a'b\\\"<=\" }}", "a\\'b\\\"\\u003C\\u003D"),
        ("{{ html \"<a>\" }}{{ urlquery \"a b/\u{e9}\" }}", "&lt;a&gt;a+b%2F%C3%A9"),
        ("{{ default \"d\" .missing }}{{ .name | default \"d\" }}", "dweb"),
        ("{{ env \"HOST\" }}{{ env \"NOPE\" }}", "h1"),
        ("{{ .name | upper | quote }}", "\"WEB\""),
        ("{{ join \"-\" .list }} {{ splitList \",\" \"x,y\" | last }}", "a-b-c y"),
        ("{{ (dict \"a\" 1).a }}{{ hasKey .map \"k\" }}", "1true"),
        ("{{ ternary \"y\" \"n\" (contains \"e\" .name) }}", "y"),
        ("{{ indent 2 \"a\\nb\" }}", "  a\n  b"),
        ("{{ eq .name \"x\" \"web\" }}{{ ne 1 2 }}{{ le 2 2 }}", "truetruetrue"),
        ("{{ `raw \"}}\" text` }}", "raw \"}}\" text"),
        ("{{ 0x10 }} {{ -3 }} {{ 1.5e3 }} {{ 'a' }} {{ true }}", "16 -3 1500 97 true"),
        ("{{ or .off .missing \"last\" }}", "last"),
        ("{{ or .name (fail \"never\") }}", "web"),
        ("{{ (fromJson \"{\\\"a\\\":[1]}\").a }}", "[1]"),
        ("{{ trunc 2 .name }}{{ replace \"e\" \"3\" .name }}{{ b64enc .name }}", "wew3bd2Vi"),
    ] {
        assert_eq!(shown(template).as_deref(), Ok(wanted), "{template}");
    }
}

#[test]
fn functions_of_sprig_do_as_there() {
    for (template, wanted) in [
        (
            "{{ kindOf .list }} {{ kindOf .none }} {{ kindIs \"map\" .map }} {{ kindOf .config }}",
            "slice invalid true ptr",
        ),
        ("{{ fromJson \"{\" }} {{ fromJson .name | default 1 }}", "<no value> 1"),
        ("{{ toRawJson \"<&>\\u2028\\\\u003c\" }} {{ toJson \"<\" }}", "\"<&>\\u2028\\\\u003c\" \"\\u003c\""),
        ("{{ toStrings .n }}{{ toStrings .none }}{{ sortAlpha .name }}{{ has 1 .none }}", "[3][][web]false"),
        (
            "{{ int \"0x10\" }} {{ int \"010\" }} {{ int \"1.9\" }} {{ int \"-.5\" }} {{ add \"1_000\" \"0b11\" }} {{ int \"-0o17\" }}",
            "16 8 1 0 1003 -15",
        ),
        (
            "{{ int \"1__0\" }}{{ int \"08\" }}{{ int \" 5\" }}{{ int \"1e3\" }}{{ int \"1.5.2\" }}{{ int \"\" }}",
            "000000",
        ),
        ("{{ atoi \"010\" }} {{ atoi \"1.5\" }} {{ atoi \"+5\" }} {{ atoi \"0x10\" }}", "10 0 5 0"),
    ] {
        assert_eq!(shown(template).as_deref(), Ok(wanted), "{template}");
    }
}

#[test]
fn says_where_and_what() {
    for (template, wanted) in [
        ("{{ if }}", "line 1: missing value for command"),
        ("{{ if .x }}", "line 1: unexpected EOF: a block is not closed by {{end}}"),
        ("a\nb{{ nope .x }}", "line 2: function \"nope\" not defined"),
        ("{{ end }}", "line 1: unexpected {{end}}"),
        ("{{ else }}", "line 1: unexpected {{else}}"),
        ("{{ .name", "line 1: unclosed action"),
        ("{{ \"x }}", "line 1: unterminated quoted string"),
        ("{{ $y }}", "line 1: undefined variable \"$y\""),
        ("{{ range $x := .list }}{{ end }}{{ $x }}", "line 1: undefined variable \"$x\""),
        ("{{ break }}", "line 1: break outside range"),
        ("{{ .name.x }}", "line 1: can't evaluate field x in type string"),
        ("{{ .config.Nope }}", "line 1: can't evaluate field Nope in type *Config"),
        ("{{ nil }}", "line 1: nil is not a command"),
        ("{{/* x */ }}", "line 1: comment ends before closing delimiter"),
        ("{{ /* x */}}", "line 1: unexpected '/' in command"),
        ("{{ range $i, $v := 2 }}{{ end }}", "line 1: can't use 2 to iterate over more than one variable"),
        ("\n{{ .config }}", "line 2: cannot print a whole *Config: name a member, or use toJSON"),
        ("{{ index .list 3 }}", "line 1: error calling index: index out of range: 3"),
        ("{{ eq .name 1 }}", "line 1: error calling eq: incompatible types for comparison"),
        ("{{ fail \"no zone\" }}", "line 1: error calling fail: no zone"),
        ("{{ .name 1 }}", "line 1: can't give argument to non-function"),
        ("{{ template \"x\" }}", "line 1: template \"x\" not defined"),
        (
            "{{ define \"x\" }}{{ template \"x\" }}{{ end }}{{ template \"x\" }}",
            "line 1: templates call each other without an end",
        ),
        ("{{ (.name }}", "line 1: unclosed left paren"),
        ("{{/* x }}", "line 1: unclosed comment"),
        ("{{ len 3 }}", "line 1: error calling len: len of type int"),
    ] {
        assert_eq!(shown(template), Err(wanted.to_owned()), "{template}");
    }
}

#[test]
fn hostile_templates_end() {
    let deep = format!("{}x{}", "{{ if .name }}".repeat(5000), "{{ end }}".repeat(5000));
    assert!(shown(&deep).unwrap_err().contains("nested too deep"));
    let parens = format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000));
    assert!(shown(&parens).unwrap_err().contains("nested too deep"));
    assert!(shown("{{ repeat 999999999 \"aaaaaaaa\" }}").unwrap_err().contains("too long"));
    assert!(shown("{{ range 100000000 }}{{ end }}").unwrap_err().contains("beyond reason"));
    assert!(shown("{{ range 99999 }}{{ range 99999 }}x{{ end }}{{ end }}").unwrap_err().contains("end"));
}

proptest::proptest! {
    #[test]
    fn any_text_renders_or_is_refused(parts in proptest::collection::vec("[{}.$a-z \"()|:=0-9\n-]{0,12}|\\{\\{|\\}\\}|if |end|range |else|index |printf ", 0..20)) {
        let _ = shown(&parts.concat());
    }

    #[test]
    fn text_without_actions_stays(text in "[^{]*") {
        proptest::prop_assert_eq!(shown(&text), Ok(text));
    }
}
