"""Hostile chat templates, and mutations of chat_template.jinja."""

from json_values import shown

CHATML = ("{% for message in messages %}{{ '<|begin|>' + message.role }}\n{{ message.content }}<|end|>{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|begin|>assistant' }}{% endif %}")


def repeated(body, times=60):
    start = "{% set ns = namespace(s='aaaa', l=[1, 2]) %}{% for i in range(" + str(times) + ") %}"
    return start + body + "{% endfor %}"


TEMPLATES = [
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | tojson }}",
    "{{ 1" + "+1" * 20_000 + " }}", "{{ 1" + "+1" * 490_000 + " }}",
    "{{ " + "(" * 400_000 + "1" + ")" * 400_000 + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}", "{{ " + "not " * 200_000 + "1 }}",
    "{% if 0 %}" + "{% elif 0 %}" * 20_000 + "{% endif %}",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000, repeated("{% set ns.s = ns.s ~ ns.s %}"),
    repeated("{% set ns.l = ns.l + ns.l %}"),
    repeated("{% set ns.s = ns.s | replace('a', 'aa') %}"),
    repeated("{% set ns.s = [ns.s, ns.s, ns.s] | join(ns.s) %}"),
    repeated("{% set ns.l = [ns.l] %}", 100_000) + "{{ ns.l }}", "{{ (['x'] * 100000) | join('y' * 100000) | length }}",
    repeated("{% set ns.l = [ns.l, ns.l] %}", 40) + "{{ ns.l == ns.l }}", "{{ 'a' * 10000000000 }}",
    "{{ range(10000000000) | list }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ '%99999999999d' % 1 }}", "{{ '%s' | format(messages) }}", "{{ messages | tojson(indent=99999999999) }}",
    "{{ 'a'.center(10000000000) }}",
    "{{ raise_exception('x\x1b[2J\nerror: y\u202e') }}", "{{ undefined.x.y }}", "{{ strftime_now('%' * 100000) }}",
    "{{ 9**9**9**9 }}",
    "{{ 1 // 0 }}{{ 1 % 0 }}", "{{ 9223372036854775807 + 1 }}", "{% include 'config.json' %}",
    "{% extends '/etc/passwd' %}", "{{ 'x' * -1 }}",
    "{{ messages[0].content }}" * 2000, "\ufdd0{{ messages[0].content }}<|en",
    "{{ messages[0].content | upper | reverse }}", "", " ", "\0",
    "{{ 'abc'[::-1] }}{{ 'abc'[0:10000000000:0] }}", "{{ messages[-9223372036854775808] }}",
    "{{ dict(a=1) | dictsort(by='x') }}", "{{ loop }}",
    "{% generation %}{% generation %}", "{{ [1, 2] | sort | batch(0) }}", "{{ range(0, 10, 0) }}",
    "{{ 'é' | slice(0) }}", "{{ 'a' | indent(10000000000) }}",
]
# Chat templates that run until they reach inferno's CPU time limit of about 3 s (src/sandbox/limits.rs).
# To save time, the script chooses them rarely.
SLOW_TEMPLATES = ["{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | pprint }}",
                  repeated("{% set ns.l = [ns.l, ns.l] %}{% set ns.x = [ns.x, ns.x] %}", 40) + "{{ ns.l == ns.x }}"]


def mutate_template(rng, data):
    kind = rng.randrange(40)
    if kind == 0:
        template = rng.choice(SLOW_TEMPLATES)
        return template.encode(), f"use the slow template {shown(template)}"
    if kind < 24:
        template = rng.choice(TEMPLATES)
        return template.encode(), f"use the template {shown(template)}"
    text = data.decode("utf-8", "replace")
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.randrange(1, 20))
    if kind < 28:
        return (text[:start] + text[end:]).encode(), f"delete characters {start}..{end} of the template"
    if kind < 32:
        repeat = text[:start] + text[start:end] * 50 + text[end:]
        return repeat.encode(), f"repeat characters {start}..{end} of the template"
    piece = rng.choice(["{{", "}}", "{%", "%}", "{#", "|", "(", ".x", "[0]", " in ", "{% endfor %}", "'", "\n", "\0",
                        "{{ ns }}"])
    return (text[:start] + piece + text[start:]).encode(), f"insert {shown(piece)} at character {start} of the template"
