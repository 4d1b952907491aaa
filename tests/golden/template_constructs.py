"""Small templates of our own, one construct each: make_template_golden.py records what jinja2 makes of them.

VARIABLES is what every case sees. A case is a template; groups are for the reader.
"""

VARIABLES = {
    "n": 7, "neg": -3, "zero": 0, "pi": 3.14159, "big": 1e16, "tiny": 0.00001, "half": 2.5, "t": True, "f": False,
    "nothing": None, "s": "Hello, World", "empty": "", "spaced": "  \t pad me \n ", "uni": "naïve Ωmega 日本語 😀 ß",
    "lines": "one\ntwo\r\nthree\n\nfive", "quote": "it's \"quoted\" \\ back\ttab\x07\u200d\u00a0",
    "html": "<a href='x'>T&C</a>", "nums": [3, 1, 2], "words": ["pear", "Apple", "fig", "apple"], "nested": [[1, 2], [3, [4]]],
    "none_list": [], "d": {"b": 1, "a": {"x": [1, 2.0, None, True]}, "items": "shadow", "C": "c"}, "empty_dict": {},
    "people": [{"name": "Ann", "age": 30, "tags": ["x", "y"]}, {"name": "bob", "age": 25, "tags": []},
               {"name": "Cy", "age": 30}],
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"},
                 {"role": "assistant", "content": "Yo"}],
    "wide": {f"key{i}": i for i in range(20)},
    "tool": {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
}

E = lambda text: ["{{ " + line.strip() + " }}" for line in text.strip().splitlines()]

TEXT = [
    "", "plain", "a{b}c", "{ {", "100% {sure}", "line\n", "line\n\n", "\n", "  \n  x\n", "a\r\nb\rc\n",
    "{# gone #}x", "a{#- gone -#} b", "a\n  {# c #}\nb", "a  {#+ c +#}  \nb", "{# {{ n }} {% if %} #}k",
    "{{ n }}\n{{ n }}\n", "{{ n }}\n\n", "  {{ n }}  ", " a {{- n -}} b ", "a\n{{- n }}\n{{ n -}}\n b",
    "{% if t %}\nx\n{% endif %}\ny", "  {% if t %}  \n  x\n  {% endif %}  \ny", "a {% if t %} b {% endif %} c",
    "a\n   {%+ if t %}\nx{% endif %}", "{% if t +%}\nx{% endif %}", "a \n {%- if t -%} \n x \n {%- endif -%} \n b",
    "{% if t %}\n\n\nx{% endif %}\n\n", "\t{% if t %}tab{% endif %}\n\t{{ n }}\n", "x{% if t %}\n  {% endif %}y",
    "{% for i in nums %}\n  - {{ i }}\n{% endfor %}\nend", "{% for i in nums -%}\n  {{ i }},\n{%- endfor %}",
    "{% raw %}{{ n }} {% if %}{% endraw %}", "{% raw %}\n x {% endraw %}\ny", "a  {%- raw -%}  {{ x }}  {%- endraw -%}  b",
    "  {% raw %}  a\n  {% endraw %}\nb", "{%raw%}{%endraw%}z", "{{ '{{' }}{{ '%}' }}", "{{'}}'}}", "{{ {'a': {'b': 1}}['a'] }}",
    "\u00a0{%- if t %}\u2003{%- endif %}x", "{%- set x = 1 -%}\n\n  {{ x }}", "{{ n -}}\n\n", "a\n{% set x = 1 %}\n\nb",
    "{{-1}}", "{{ -1 }}", "{%if t%}a{%endif%}", "{{\n n \n}}", "{% if t\n %}x{% endif\n%}", "{% set a = 'x\ny' %}{{ a }}",
]

LITERALS = E(r"""
1
1_000
0x1F
0b101
0o17
1.5
1e3
1.5e-7
1E+2
0.1 + 0.2
1e16
123456789012345680.0
1e-5
0.0001
100000.0
1e22
-0.0
5e-324
1.7976931348623157e308
'single' "double"
'a' 'b' "c"
'it\'s'
"say \"hi\""
'tab\tnl\nend'
'\x41\u00e9\U0001F600\101'
'\d\w'
'a\\
b'
[1, 2, 3,]
[]
()
(1,)
(1, 2)
1, 2
{}
{'a': 1, 'b': [1, {'c': none}]}
{1: 'x', 1.0: 'y', true: 'z'}
true, True, false, False, none, None
[true, none, 1.0, 'x', "it's"]
'日本' ~ "語"
quote
[quote]
[uni, spaced, html]
['\x00\x1f\x7f\x80\xa0\xad\u2028\ue000\U000e0001']
d
nested
nothing
undefined_name
[undefined_name]
""")

OPERATORS = E(r"""
1 + 2 * 3 - 4 / 2
(1 + 2) * 3
7 // 2, -7 // 2, 7 // -2, 7.5 // 2
7 % 3, -7 % 3, 7 % -3, 7.5 % 2, -7.5 % 2
2 ** 10, 2 ** -1, 2.0 ** 3, -2 ** 2, 2 ** 3 ** 2
7 / 2, 6 / 2, 1 / 3
+n, -n, - -n
n + 1.5, t + 1, 3 * t
'a' + 'b', 'ab' * 3, 2 * 'x', 'a' * -1
[1] + [2], [0] * 3, (1,) + (2,)
1 ~ 'a' ~ none ~ 2.0 ~ [1] ~ undefined_name
1 ~ 2 + 3
1 + 2 ~ 3
'%s is %d and %.2f, %5s|%-5s|%05d %x %%' % ('a', 3, 2.5, 'r', 'l', 42, 255)
'%s' % 'x', '%r' % 'x', '%(k)s' % {'k': 1}
'%e %g %G %+d % d' % (12345.678, 0.00001234, 1e20, 5, 5)
1 < 2 < 3, 1 < 3 < 2, 1 == 1.0, true == 1, '1' == 1
'a' < 'b', 'Z' < 'a', 'é' > 'z', [1, 2] < [1, 3], (1,) < (1, 0)
1 != 2, 'a' != 'a', none == none, undefined_name == undefined_name, [] == (), {} == {}
n >= 7, n <= 7, n > 7, n < 7
'ell' in s, 'x' in s, '' in s, 1 in nums, 9 not in nums, 'a' in d, 'zz' in d, 'b' not in d
none in [none], 'k' in undefined_name, 2 in (1, 2), 1.0 in nums
t and f, t or f, not t, n and s, zero or 'z', zero and 1, '' or none
not n == 7, not not n, not 'x' in s
1 if t else 2, 1 if f else 2, (1 if f) is defined, 1 if f
'a' if f else 'b' if f else 'c'
1 if t else 2 + 10
nums[0], nums[-1], nums[5] is defined, s[0], s[-1], uni[6], uni[-1]
nums[1:], nums[:-1], nums[::2], nums[::-1], nums[-2:], nums[10:], nums[2:1]
s[1:4], s[:5], s[-5:], s[::-1], s[::3], uni[6:11], uni[-3:], uni[::-1], s[5:1:-2]
(1, 2, 3)[1:], [1,2,3,4,5][-1:-4:-2]
nested[1][1][0], d['a'].x[1], d.a['x'][3]
d.items is callable, d['items'], d.a.x, d.nope is defined, d['nope'] is defined
d.b, d['b'], d.C
people[0].name, people[0]['name'], people.0.name
s.length is defined, s['upper'](), nums['0'] is defined
1.5 is float, 3.x is defined
n.x is defined, nothing.x is defined, t.x
1 if undefined_name else 2
{'a': 1}.a, {'a': 1}['a'], [1, 2][1], 'abc'[1]
true and 'yes' or 'no'
(n, s)[0]
[1, 'a', none] == [1, 'a', none], {'a': 1, 'b': 2} == {'b': 2, 'a': 1}
-n | abs, -3 | abs
n is odd and s is string
9223372036854775807, -9223372036854775807
10 ** 18
""")

STRING_METHODS = E(r"""
spaced.strip() ~ '|' ~ spaced.lstrip() ~ '|' ~ spaced.rstrip() ~ '|'
'xxhixx'.strip('x'), 'abcba'.lstrip('ab'), 'abcba'.rstrip('ab'), ' x '.strip(none)
s.split(), s.split(', '), 'a,b,,c'.split(','), 'a,b,c'.split(',', 1), 'a b  c'.split(none, 1), ''.split(), ''.split(',')
'a,b,c'.rsplit(',', 1), ' a b  c '.rsplit(none, 1), 'a b c'.rsplit(), 'a b c'.rsplit(' ', 5)
'a</think>b</think>c'.split('</think>')[-1], 'x'.split('</think>')[0]
lines.splitlines(), lines.splitlines(true), 'a\x0bb\x85c\u2028d'.splitlines()
'k=v=w'.partition('='), 'k=v=w'.rpartition('='), 'kv'.partition('='), 'kv'.rpartition('=')
s.startswith('Hell'), s.startswith(('x', 'H')), s.endswith('ld'), s.endswith(('a', 'b')), s.startswith('ello', 1), s.startswith('')
s.replace('l', 'L'), s.replace('l', 'L', 2), 'abc'.replace('', '-'), 'aaa'.replace('aa', 'b'), uni.replace('Ω', 'omega')
s.upper(), s.lower(), s.title(), s.capitalize(), uni.upper(), uni.lower(), uni.title(), uni.capitalize()
"they're bill's".title(), 'ΑΣ ΟΔΟΣ'.lower(), 'ǆ'.title(), 'ﬁn'.upper(), 'İ'.lower()
s.find('o'), s.rfind('o'), s.find('zz'), uni.find('日'), s.find('o', 5), s.find('o', 5, 6), s.index('W'), s.find('')
s.count('l'), s.count('l', 4), 'aaaa'.count('aa'), 'abc'.count('')
', '.join(['a', 'b']), ''.join([]), '-'.join('abc'), ', '.join(d.keys())
'{} {}'.format(1, 'a'), '{0}{1}{0}'.format('x', 'y'), '{a}-{b}'.format(a=1, b=none), '{{}}'.format()
'{:>5}|{:<5}|{:^5}|{:05d}|{:.2f}|{:,}|{:x}|{!r}'.format('a', 'b', 'c', 42, 3.14159, 1234567, 255, 'q')
'{:*^9}|{:+d}|{:e}|{:%}|{:10.3f}|{:.3}|{:s}'.format('mid', 5, 12345.678, 0.5, 2.0, 'abcdef', 'z')
'{0[name]} {0.age} {1[0]}'.format(people[0], nums)
'unprefix'.removeprefix('un'), 'file.txt'.removesuffix('.txt'), 'abc'.removeprefix('x')
'123'.isdigit(), '12a'.isdigit(), ''.isdigit(), '١٢'.isdigit(), '²'.isdigit(), '²'.isdecimal(), '½'.isnumeric()
'abc'.isalpha(), 'aé日'.isalpha(), 'a1'.isalnum(), ' \t'.isspace(), ''.isspace(), 'ABC'.isupper(), 'abc1'.islower(), '1'.islower()
'7'.zfill(3), '-7'.zfill(4), 'x'.ljust(3) ~ '|', 'x'.rjust(3), 'x'.center(4, '*'), 'ab'.center(5, '-')
'a'.join(['x']), s.strip().split(',')[0].lower().startswith('hello')
""")

CONTAINERS = E(r"""
d.keys(), d.values()
d.items()
{'x': 1}.items(), {'x': 1}.keys(), {'x': 1}.values()
{'x': 1}.items() | list
d.get('b'), d.get('zz'), d.get('zz', 'dflt'), d.get('a').get('x')
nums.index(1), nums.count(3), (1, 2, 1).count(1), nums.copy()
dict(a=1, b=2), dict([('x', 1)]), dict({'q': 1}, z=2), dict()
range(3), range(1, 3), range(5, 0, -2), range(3) | list, range(0) | list, range(10, 0, -3) | list
range(3)[1], range(5) | length, 2 in range(3), range(3) is sequence
namespace(a=1), namespace(), namespace({'a': 2}, b='x')
wide.key15, 'key19' in wide, wide | length, wide['key3']
2.0.is_integer(), 2.5.is_integer()
[1, [2, [3]]], {'a': {'b': (1, 2)}}
""")

FILTERS = E(r"""
d | tojson
tool | tojson
tool | tojson(indent=2)
tool | tojson(indent=4)
nested | tojson(indent=2), none_list | tojson(indent=2), empty_dict | tojson(indent=2)
d | tojson(separators=(',', ':'))
d | tojson(sort_keys=true)
d | tojson(ensure_ascii=true), uni | tojson(ensure_ascii=true), uni | tojson
quote | tojson, html | tojson
[1, 1.0, 1e20, -0.5, true, false, none, 'x', (1, 2)] | tojson
{1: 'a', 2.5: 'b', true: 'c', none: 'd'} | tojson
'\x00\x1f\x7f\u2028' | tojson
pi | tojson, 'str' | tojson, none | tojson
[1, 2] | tojson(indent='--')
spaced | trim ~ '|', 'xxaxx' | trim('x'), 5 | trim
s | length, nums | length, d | length, uni | length, none_list | count, undefined_name | length
undefined_name | default('x'), nothing | default('x'), empty | default('x', true), zero | d('z', boolean=true), undefined_name | default
nums | join, nums | join(', '), people | join('-', attribute='name'), 'abc' | join('.'), [1, none, 2.5] | join('|')
nums | first, nums | last, s | first, s | last, none_list | first, none_list | last, {'a': 1} | first
'abc' | list, d | list, nums | list, (1, 2) | list
people | map(attribute='name') | list, people[:2] | map(attribute='tags.0') | list, people | map(attribute='zz', default='-') | list
words | map('upper') | list, words | map('replace', 'p', 'b') | join(' '), nums | map('string') | join('+'), words | map('length') | list
[0, 1, '', 'a', none] | select | list, nums | select('odd') | list, nums | select('greaterthan', 1) | list, nums | reject('odd') | list
people | selectattr('age', 'equalto', 30) | map(attribute='name') | list, people | selectattr('tags') | list | length
people | rejectattr('age', 'eq', 30) | map(attribute='name') | join, people | selectattr('tags', 'defined') | list | length
messages | selectattr('role', '==', 'user') | list, messages | rejectattr('role', 'in', ['user', 'system']) | list
s | upper, s | lower, 'hELLO wORLD' | capitalize, "it's a-new (day) [x]<y" | title, uni | title, 5 | upper
s | replace('l', 'L'), s | replace('l', 'L', 1), 'aXb' | replace('X', 5), 111 | replace(1, 2)
n | string ~ 'x', [1] | string, none | string, 1.0 | string
'42' | int, '4.7' | int, 'x' | int, 'x' | int(-1), 3.9 | int, -3.9 | int, 'ff' | int(0, 16), '0x1f' | int(base=16), ' 12 ' | int, '1_000' | int, none | int, true | int
'3.5' | float, 'x' | float, 'x' | float(1.5), 3 | float, 'inf' | float, '1e3' | float, ' 2 ' | float, none | float
{'a': 1} | items | list, undefined_name | items | list
d | dictsort, {'b': 1, 'A': 2, 'c': 0} | dictsort, {'b': 1, 'A': 2} | dictsort(true), {'b': 1, 'A': 2} | dictsort(by='value'), {'b': 1, 'A': 2} | dictsort(reverse=true)
nums | sort, words | sort, words | sort(case_sensitive=true), nums | sort(reverse=true), people | sort(attribute='age') | map(attribute='name') | list, people | sort(attribute='age,name', reverse=true) | map(attribute='name') | list
words | unique | list, [1, 1.0, 2] | unique | list, people | unique(attribute='age') | map(attribute='name') | list, words | unique(true) | list
nums | reverse | list, s | reverse, (1, 2) | reverse | list
'a\nb\n\nc' | indent, 'a\nb' | indent(2), 'a\nb\n\nc' | indent(2, true), 'a\n\nb' | indent(3, blank=true), 'a\nb' | indent('> '), 'a\nb\n' | indent(2)
html | e, html | escape, html | safe, (html | e) | e, (html | safe) | e
(html | safe) + '<i>', '<i>' + (html | safe), (html | safe) ~ '<i>', (html | e) + 'x', ('<' | safe) * 2
html | forceescape, [html | safe], (html | safe) is escaped, html is escaped, (html | safe) | upper, ('<b>' | safe).lower() + '<'
2.5 | round, 3.5 | round, 2.675 | round(2), 1234.567 | round(-2), 2.1 | round(method='ceil'), 2.9 | round(0, 'floor'), 7 | round, 0.5 | round, 2.345 | round(1, 'ceil')
-5 | abs, -2.5 | abs, nums | sum, [1.5, 2] | sum, people | sum(attribute='age'), [[1], [2]] | sum(start=[]), nums | sum(start=10)
nums | min, nums | max, words | min, words | max, people | max(attribute='age'), none_list | min, ['b', 'A'] | min(case_sensitive=true)
[1,2,3,4,5] | batch(2) | list, [1,2,3] | batch(2, 'x') | list, [1,2,3,4,5] | slice(2) | list, [1,2,3,4,5] | slice(3, '-') | list
people | groupby('age'), people | groupby('age') | map(attribute='grouper') | list, (people | groupby('age'))[0].list | length, words | groupby(0)
'the quick  brown fox' | wordcount, '%s-%s' | format(1, 'b'), '%(a)s' | format(a=3)
'hello world foo bar' | truncate(11), 'hello world foo bar' | truncate(11, true), 'hello world' | truncate(9), 'hello world' | truncate(5, true, '', 0)
'a b&c/d?é' | urlencode, {'a b': 1, 'c': 'd&e'} | urlencode, [('x', 1)] | urlencode
'x' | center(5) ~ '|', 'ab' | center(5) ~ '|'
d | attr('b') is defined, 'abc' | attr('upper') is defined
[3, 1] | sort | first, words | map('lower') | unique | sort | join(',')
nums | map('tojson') | join(','), messages | map(attribute='content') | map('trim') | list
'  a  ' | trim | upper | replace('A', 'B') | length
nums | select('in', [1, 2]) | list, ['a', 'B'] | select('lower') | list, [1, 'a'] | select('string') | list
s|length == 12 and nums|length > 2
(nums | map('string')) | list | length
'abc' | map('upper') | list, {'k': 1} | map('upper') | list
""")

TESTS = E(r"""
n is defined, undefined_name is defined, undefined_name is undefined, d.zz is undefined, nothing is defined
nothing is none, n is none, nothing is not none, undefined_name is none
s is string, n is string, (s | safe) is string
n is number, pi is number, t is number, s is number, n is integer, t is integer, pi is integer, pi is float, n is float
t is boolean, n is boolean, t is true, f is false, n is true, 1 is true
d is mapping, nums is mapping, namespace() is mapping
nums is iterable, s is iterable, d is iterable, n is iterable, undefined_name is iterable, nothing is iterable
nums is sequence, s is sequence, d is sequence, n is sequence, (1,) is sequence, d.items() is sequence, undefined_name is sequence
range is callable, s.upper is callable, n is callable, undefined_name is callable
3 is odd, 4 is even, 9 is divisibleby 3, 9 is divisibleby(2), 3 is not odd
n is eq 7, n is equalto(7), n is ne 7, n is lt 8, n is le 7, n is gt 7, n is ge 7, n is greaterthan 6, n is lessthan 6
2 is in nums, 2 is in([1]), 'a' is in 'abc', 'q' is not in 'abc'
'ABC' is upper, 'abc' is lower, 'aB' is lower, '' is upper
none is sameas none, t is sameas true, n is sameas 7, s is sameas s
'upper' is filter, 'zz' is filter, 'odd' is test, 'zz' is test
n is defined and s is string or f, not n is none, n is not none and t
(n is odd) == true, n is odd == true
nums[0] is defined, nums[9] is defined, d['a']['x'] is defined
1 if n is odd else 2, 'x' if s is string and n is number else 'y'
n is number and n > 5, nums is iterable and nums is not mapping and nums is not string
undefined_name is not defined or undefined_name.x
""")

STATEMENTS = [
    # The shape of TinyLlama's and Zephyr's: blocks on lines of their own, the prompt at the last turn.
    "{% for turn in messages %}\n{% if turn['role'] == 'system' %}\n{{ '<|sys|>\n' + turn['content'] + '</s>' }}\n{% elif turn['role'] == 'user' %}\n"
    "{{ '<|usr|>\n' + turn['content'] + '</s>' }}\n{% else %}\n{{ '<|bot|>\n'  + turn['content'] + '</s>' }}\n{% endif %}\n"
    "{% if loop.last and t %}\n{{ '<|bot|>' }}\n{% endif %}\n{% endfor %}",
    "{% if n == 7 %}a{% elif n == 8 %}b{% else %}c{% endif %}", "{% if f %}a{% elif t %}b{% else %}c{% endif %}",
    "{% if f %}a{% elif zero %}b{% else %}c{% endif %}", "{% if undefined_name %}a{% else %}b{% endif %}",
    "{% if nums and d and s and t and not f and not none_list %}y{% endif %}", "{% if f %}x{% endif %}",
    "{% for x in nums %}{{ x }}{% endfor %}", "{% for x in none_list %}a{% else %}empty{% endfor %}",
    "{% for x in nums %}a{% else %}empty{% endfor %}", "{% for x in undefined_name %}a{% else %}e{% endfor %}",
    "{% for k in d %}{{ k }} {% endfor %}", "{% for k, v in {'x': 1, 'y': 2}.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for c in 'añ😀' %}[{{ c }}]{% endfor %}", "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for x in nums %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }};{% endfor %}",
    "{% for x in nums %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }} {% endfor %}",
    "{% for x in nums %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }} {% endfor %}",
    "{% for x in nums %}{{ loop.cycle('a', 'b') }}{{ loop.depth }}{{ loop.depth0 }}{% endfor %}",
    "{% for x in [1, 1, 2, 2, 1] %}{{ loop.changed(x) }} {% endfor %}",
    "{% for x in nums if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }}{{ ',' if not loop.last }}{% endfor %}",
    "{% for x in nums if x > 9 %}{{ x }}{% else %}none{% endfor %}",
    "{% set ns = namespace(c=0) %}{% for x in [1,2,3,4] if ns.c < 2 %}{{ x }}{% set ns.c = ns.c + 1 %}{% endfor %}",
    "{% set ns = namespace(c=0) %}{% for x in [1,2,3,4] if ns.c < 2 %}{{ x }}{{ loop.last }}{% set ns.c = ns.c + 1 %}{% endfor %}",
    "{% for x in nums %}{% for y in nums %}{{ loop.index }}{% endfor %}{{ loop.index }} {% endfor %}",
    "{% for x in nums %}{% set outer = loop %}{% for y in 'ab' %}{{ outer.index }}{{ y }}{% endfor %}{% endfor %}",
    "{% for x in [1,2,3,4] %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in nums %}{{ x }}{% break %}{% else %}no{% endfor %}", "{% for x in nums %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% else %}no{% endfor %}",
    "{% for x in nums %}{% continue %}{% else %}no{% endfor %}",
    "{% for x in nums %}{% for y in nums %}{% if y == 1 %}{% break %}{% endif %}{{ y }}{% endfor %}|{% endfor %}",
    "{% for item in nested recursive %}{% if item is iterable %}({{ loop(item) }}){% else %}{{ item }}@{{ loop.depth }}{% endif %}{% endfor %}",
    "{% for x in nums %}{% set v = x %}{% endfor %}{{ v is defined }}", "{% set v = 0 %}{% for x in nums %}{% set v = v + x %}{{ v }}{% endfor %}{{ v }}",
    "{% set x = 'o' %}{% for x in nums %}{{ x }}{% endfor %}{{ x }}", "{{ loop is defined }}",
    "{% set a = 1 %}{{ a }}{% set a = a + 1 %}{{ a }}", "{% set a, b = 1, 2 %}{{ b }}{{ a }}", "{% set a, b = 'xy' %}{{ a }}-{{ b }}",
    "{% set (a, b) = (1, 2) %}{{ a + b }}", "{% set x = 1, 2 %}{{ x }}", "{% if t %}{% set q = 5 %}{% endif %}{{ q }}",
    "{% set x %}block {{ n }}{% endset %}[{{ x }}]", "{% set x | upper | replace('B', 'c') %}block {{ s }}{% endset %}{{ x }}",
    "{% set ns = namespace(a=1, b=[]) %}{% for i in nums %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b + [i] %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.zz is defined }}",
    "{% set ns = namespace() %}{% set ns.x = 'v' %}{{ ns.x }}{{ ns }}", "{% set ns = namespace(a=0) %}{% set ns.a, b = 1, 2 %}{{ ns.a }}{{ b }}",
    "{% set ns = namespace(t='') %}{% set ns.t %}b{{ n }}{% endset %}{{ ns.t }}",
    "{% macro m(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(1, c='z') }}{{ m(b=1, a=2) }}{{ m() }}",
    "{% macro m() %}{{ n }}{{ late }}{% endmacro %}{% set late = 'L' %}{{ m() }}", "{% macro m(x) %}{% set n = x %}{{ n }}{% endmacro %}{{ m(1) }}{{ n }}",
    "{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m('q') }}", "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, k=3) }}",
    "{% macro f(x) %}{{ x }}{{ f(x - 1) if x > 0 }}{% endmacro %}{{ f(5) }}", "{% macro m(x) %}  {{ x }}\n{% endmacro %}[{{ m('a') | trim }}]",
    "{% macro w(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call w('p') %}in {{ n }}{% endcall %}",
    "{% macro l(xs) %}{% for x in xs %}{{ caller(x, loop.index) }}{% endfor %}{% endmacro %}{% call(a, i) l(nums) %}[{{ i }}:{{ a }}]{% endcall %}",
    "{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}", "{% macro m(x) %}a{% endmacro %}{{ m is callable }}{{ m.name }}{{ m }}",
    "{% macro a() %}A{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}", "{% macro m(x=[]) %}{{ x | length }}{% endmacro %}{{ m([1]) ~ m() }}",
    "{% macro m(x) %}{% for i in x %}{{ i }}{% endfor %}{% endmacro %}{% for r in nested %}{{ m(r) }}/{% endfor %}",
    "{% macro m(x) -%}\n  {{ x }}\n{%- endmacro %}{{ m(1) }}{{ m(x=2) }}", "{% macro m(a) %}{{ a is defined }}{% endmacro %}{{ m() }}{{ m(none) }}",
    "{% macro m(*a) %}{% endmacro %}", "{% macro m(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ m(*[1, 2]) }}{{ m(**{'a': 3, 'b': 4}) }}{{ m(1, *[2]) }}",
    "{% filter upper %}abc {{ n }} x{% endfilter %}", "{% filter replace('a', 'b') | trim %}  aaa {% endfilter %}|",
    "{% with a = 1, b = n %}{{ a + b }}{% endwith %}{{ a is defined }}", "{% with %}{% set z = 1 %}{{ z }}{% endwith %}{{ z is defined }}",
    "{% generation %}gen {{ n }}{% endgeneration %}", "{% for m in messages %}{% generation %}\n{{ m.content }}{{ loop.last }}\n{% endgeneration %}\n{% endfor %}",
    "{% generation %}{% set g = 1 %}{% endgeneration %}{{ g is defined }}", "{% print n, s %}",
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\\n' }}{% endfor %}",
    "{% for m in messages[1:] %}{{ m.role }}{% endfor %}{% if messages[0].role == 'system' %}S{% endif %}",
    "{% if messages | length > 2 and messages[-1].role != 'user' %}{{ messages[-1].content }}{% endif %}",
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}x{% else %}y{% endif %}{% endfor %}",
    "{% set x = messages | selectattr('role', 'equalto', 'system') | list %}{{ x[0].content if x else '' }}",
    "{% for i in range(messages | length - 1, -1, -1) %}{{ messages[i].role }} {% endfor %}",
    "{% for m in messages[::-1] %}{{ loop.index }}{{ m.role }}{% endfor %}", "{% for m in messages | reverse %}{{ m.role }}{% endfor %}",
    "{% for k, v in d | dictsort %}{{ k }}{% endfor %}", "{% for k, v in wide | items %}{{ v }}{{ ',' if not loop.last else '' }}{% endfor %}",
    "{% set g = nums | map('string') %}{{ g | join }}{{ g | join }}|", "{% set g = nums | select %}{% for x in g %}{{ x }}{% endfor %}{% for x in g %}{{ x }}{% endfor %}",
    "{% for g in people | groupby('age') %}{{ g.grouper }}:{% for p in g.list %}{{ p.name }}{% endfor %};{% endfor %}",
    "{% for a, b in people | groupby('age') %}{{ a }}{{ b | length }}{% endfor %}", "{% for row in range(5) | batch(2) %}{{ row }}{% endfor %}",
    "{% if f %}{{ x | nofilter }}{% endif %}ok", "{{ (x | nofilter) if f else 'ok' }}", "{% if f %}{{ x is notest }}{% endif %}ok",
    "{% if 'a' in 'abc' %}{% set r %}{% if t %}in{% endif %}{% endset %}{% endif %}{{ r }}", "{% for x in nums %}{% set y %}{{ x }}{% if x == 1 %}{% break %}{% endif %}{% endset %}{{ y }}{% endfor %}",
    "{{ strftime_now('') }}", "{% set f2 = s.upper %}{{ f2() }}", "{% set r = range %}{{ r(2) | list }}", "{% if s is defined %}{%- endif %} z",
    "{% set content = '<think>a</think>b' %}{% if '</think>' in content %}{{ content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}{% endif %}",
    "{% set x = {'a': 1} %}{% for k in x %}{{ k }}{{ x[k] }}{% endfor %}", "{% set x = dict(d, z=9) %}{{ x.z }}{{ x | length }}",
    "{% for x in [[1, 'a'], [2, 'b']] %}{% set a, b = x %}{{ b }}{{ a }}{% endfor %}", "{% set loop_x = 3 %}{% for i in range(loop_x) %}{{ i }}{% endfor %}",
    "{% for x in d.a.x %}{{ x }},{% endfor %}", "{% for x in (1, 2) %}{{ x }}{% endfor %}", "{% for x in 1, 2 %}{{ x }}{% endfor %}",
    "{%- for m in messages %}\n    {%- if loop.first %}\n        {{- 'F' }}\n    {%- endif %}\n    {{- m.role }}\n{%- endfor %}\n",
]

ERRORS = [
    "{{ undefined_name.x }}", "{{ undefined_name['x'] }}", "{{ undefined_name() }}", "{{ undefined_name + 1 }}", "{{ d.zz.y }}", "{{ -undefined_name }}",
    "{{ 1 + 'a' }}", "{{ 'a' + 1 }}", "{{ [1] + (2,) }}", "{{ none + 1 }}", "{{ 1 / 0 }}", "{{ 1 // 0 }}", "{{ 1 % 0 }}", "{{ 1.0 / 0 }}",
    "{{ 1 < 'a' }}", "{{ none < 1 }}", "{{ 1 in 's' }}", "{{ 'a' in none }}", "{{ 'a' in 5 }}", "{% for x in none %}{% endfor %}", "{% for x in 5 %}{% endfor %}",
    "{% for a, b in nums %}{% endfor %}", "{% for a, b in [(1, 2, 3)] %}{% endfor %}", "{% set a, b = 1 %}", "{{ none() }}", "{{ 'x'() }}",
    "{{ raise_exception('boom') }}", "{% if messages[0].role == 'system' %}{{ raise_exception('no ' + 'system') }}{% endif %}",
    "{{ nums.append(4) }}", "{{ d.update({}) }}", "{{ d.pop('a') }}", "{{ nums.sort() }}", "{{ s.nomethod() }}", "{{ undefined_name | tojson }}", "{{ {(1, 2): 3} | tojson }}",
    "{{ range(3) | tojson }}", "{{ n | length }}", "{{ none | length }}", "{{ nums | map('string') | length }}", "{{ 'a,b'.split('') }}", "{{ s.index('zz') }}",
    "{{ s.join([1]) }}", "{{ '%d' % 'x' }}", "{{ '%s %s' % 'x' }}", "{{ '%s' % (1, 2) }}", "{{ '{}'.format() }}", "{{ {[]: 1} }}", "{{ [1, 'a'] | sort }}", "{{ range(100001) | list }}",
    "{{ range(1, 2, 0) }}", "{{ nums[::0] }}", "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(z=1) }}", "{% set s.x = 1 %}", "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% for x in nums %}{{ loop(x) }}{% endfor %}", "{{ s | nofilter }}", "{{ s is notest }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ nums | join(attribute='x.y') }}",
    "{% if %}{% endif %}", "{% if t %}", "{% for x in %}{% endfor %}", "{% endif %}", "{% nosuchtag %}", "{{ }}", "{{ 1 + }}", "{{ (1 }}", "{{ 'abc }}", "{{ [1, }}", "{{ {'a' 1} }}", "{# open",
    "{% raw %} open", "{{ a b }}", "{{ 1 ! 2 }}", "{{ n | }}", "{{ n is }}", "{% set 1 = 2 %}", "{% set none = 2 %}", "{% break %}", "{% for x in nums %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}", "{% else %}",
    "{{ f(a=1, 2) }}", "{% macro m(a=1, b) %}{% endmacro %}", "{{ a.}}", "{{ a[ }}", "{% call n %}{% endcall %}", "{{ n is odd is even }}", "{{ '\\u12' }}", "{{ ) }}", "{{ (] }}", "{{ n ? 1 : 2 }}", "{{ x = 1 }}",
    "{% for x in nums %}{% else %}", "{% if t %}{% endfor %}", "{{ d.items.x.y }}", "{{ nums | first | first }}", "{{ '' | first | upper ~ none_list[0].x }}", "{{ 'x' * 10 ** 12 }}", "{{ abs(1) }}", "{{ len(nums) }}",
]

STATEFUL = [
    "{% set j = joiner('|') %}{% for i in nums %}{{ j() }}{{ i }}{% endfor %}", "{% set j = joiner() %}{{ j() }}x{{ j() }}",
    "{% set c = cycler('a', 'b', 3) %}{% for i in range(5) %}{{ c.current }}{{ c.next() }} {% endfor %}{{ c.pos }}{{ c.items }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{% set _ = c.reset() %}{{ c.current }}", "{{ cycler() }}",
    "{% set x = 'ab cd' %}{{ x is sameas 'ab cd' }}", "{% set x = 'ab' %}{% set y = 'ab' %}{{ x is sameas y }}",
    "{{ s is sameas 'Hello, World' }}", "{% set x = 'é日' %}{{ x is sameas 'é日' }}{{ x is sameas 'é' }}",
    "{{ html|striptags }}", "{{ '<p>a<b>c</b></p>\n d&lt;e&gt; <unclosed'|striptags }}", "{{ 5|striptags }}",
    "{{ '&amp;&#65;&#x41;&nbsp;&;&#;& x'|striptags }}", "{{ '<!-- <b> --> x <!-- open'|striptags }}", "{{ gone|striptags }}",
    "{{ s.swapcase() }}", "{{ uni.swapcase() }}", "{{ 'ǅ ß ﬁ Σ'.swapcase() }}", "{{ html|safe|striptags is escaped }}",
]

ESCAPED = [
    "{% autoescape true %}{{ html }}<i>{{ '<' }}{{ html|safe }}{{ html|e }}{{ n }}{{ nums }}{{ gone }}{{ d }}{% endautoescape %}{{ html }}",
    "{% autoescape false %}{{ html }}{% autoescape true %}{{ html }}{% autoescape false %}{{ html }}{% endautoescape %}{{ html }}{% endautoescape %}{% endautoescape %}",
    "{% autoescape n > 0 %}{{ html }}{{ '<' ~ html }}{{ ('<' ~ (html|safe)) is escaped }}{% endautoescape %}", "{% autoescape gone %}{{ html }}{% endautoescape %}",
    "{% autoescape true %}{{ '<' ~ html }}{{ '<' ~ (html|safe) ~ 5 ~ '&' }}{{ ('<' ~ html) is escaped }}{{ ('a' ~ (html|safe)) is escaped }}{% endautoescape %}",
    "{% autoescape true %}{% set x %}<b>{{ html }}{% endset %}{{ x }}{{ x is escaped }}{{ x ~ '<' }}{% set y | upper %}<a>{{ '<' }}{% endset %}{{ y }}{{ y is escaped }}{% endautoescape %}",
    "{% macro m(v) %}<m>{{ v }}{% endmacro %}{% autoescape true %}{{ m('<') }}{{ m('<') is escaped }}{% endautoescape %}{{ m('<') is escaped }}",
    "{% autoescape true %}{% macro m(v) %}<m>{{ v }}{{ caller() }}{% endmacro %}{% call m('<') %}<c>{{ html }}{% endcall %}{% endautoescape %}{{ m is defined }}",
    "{% autoescape true %}{% filter upper %}<a>{{ '<b' }}{% endfilter %}{% filter replace('A', '<') %}a{% endfilter %}{% endautoescape %}",
    "{% autoescape true %}{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}<{{ loop(x) }}>{% else %}{{ x }}{{ '<' }}{% endif %}{% endfor %}{% endautoescape %}",
    "{% autoescape true %}{{ ['<', '>']|join('&') }}{{ ['<', '>'|safe]|join('&') }}{{ ['<', 1]|join('&'|safe) }}{{ (['<']|join) is escaped }}{{ [d]|join(', ', attribute='a') }}{% endautoescape %}",
    "{% autoescape true %}{{ '<a>'|replace('<', '&') }}{{ '<a>'|safe|replace('<', '&') }}{{ '<a>'|replace('<'|safe, '-') }}{{ '<a>'|replace('a', '<b>'|safe) }}{{ ('a'|replace('a', 'b')) is escaped }}{% endautoescape %}",
    "{{ ['<', '>'|safe]|join('&') }}{{ '<a>'|safe|replace('<', '&') is escaped }}{{ (['<'|safe]|join) is escaped }}",
    "{% autoescape true %}{% print html, '<' %}{{ 'a' if html else '<' }}{{ html|upper|length }}{{ html[:2] }}{{ html|safe|trim }}{% endautoescape %}",
    "{% autoescape true %}{% set x = 1 %}{% endautoescape %}{{ x }}", "{% for i in nums %}{% autoescape true %}{% if i == 2 %}{% break %}{% endif %}{{ '<' }}{% endautoescape %}{{ '<' }}{% endfor %}{{ '<' }}",
    "{% autoescape %}{% endautoescape %}", "{% autoescape true %}", "{% endautoescape %}", "{% autoescape true %}{{ d.x.y }}{% endautoescape %}",
    "{{ ('<b>%s</b>'|safe) % '<i>' }}", "{{ ('<b>{}</b>'|safe).format('<i>') }}", "{{ '<b>%s</b>'|safe|format('<i>') }}", "{{ ('<'|safe).join(['>', '&'|safe]) }}", "{{ ('<a>'|safe).replace('<', '<<') }}",
]

BIG = "123456789012345678901234567890"
LONG_INTEGERS = [
    "{{ 2 ** 64 }} {{ -2 ** 64 }} {{ 9223372036854775807 + 1 }} {{ -9223372036854775807 - 2 }} {{ 9223372036854775808 - 1 }} {{ 4294967296 * 4294967296 }}",
    "{{ 99999999999999999999 }} {{ 0xffffffffffffffffff }} {{ 0b1" + "0" * 70 + " }} {{ 1_000_000_000_000_000_000_000 }} {{ -99999999999999999999 }} {{ +99999999999999999999 }}",
    f"{{{{ {BIG} // 7 }}}} {{{{ -{BIG} // 7 }}}} {{{{ {BIG} // -98765432109876543210 }}}} {{{{ {BIG} % 97 }}}} {{{{ -{BIG} % 97 }}}} {{{{ {BIG} % -98765432109876543210 }}}} {{{{ 7 // {BIG} }}}} {{{{ -7 // {BIG} }}}} {{{{ -7 % {BIG} }}}}",
    f"{{{{ {BIG} / 7 }}}} {{{{ 7 / {BIG} }}}} {{{{ {BIG} / {BIG} }}}} {{{{ 10 ** 400 / 10 ** 399 }}}} {{{{ 9007199254740993 / 9007199254740991 }}}} {{{{ {BIG} * 1.5 }}}} {{{{ {BIG} + 0.5 }}}} {{{{ {BIG} ** 0.5 }}}} {{{{ 2 ** -{BIG} if false else 1 }}}}",
    f"{{{{ {BIG} == {BIG} }}}} {{{{ {BIG} > 5 }}}} {{{{ {BIG} < -5 }}}} {{{{ 2 ** 70 == 1180591620717411303424.0 }}}} {{{{ 2 ** 70 + 1 > 1180591620717411303424.0 }}}} {{{{ 1e30 < 10 ** 30 }}}} {{{{ 10 ** 400 > 1e308 }}}} {{{{ 1e308 * 10 > 10 ** 400 }}}} {{{{ -(10 ** 400) < -1e308 }}}}",
    f"{{{{ '{BIG}'|int }}}} {{{{ '-{BIG}'|int }}}} {{{{ 'f' * 20 }}}} {{{{ ('f' * 20)|int(base=16) }}}} {{{{ 1e25|int }}}} {{{{ {BIG}|int }}}} {{{{ {BIG}|float }}}} {{{{ -{BIG}|abs }}}} {{{{ (-{BIG})|abs }}}} {{{{ {BIG}|round }}}} {{{{ '1e25'|int }}}}",
    f"{{{{ {BIG}|tojson }}}} {{{{ [{BIG}] }}}} {{{{ {{{BIG}: 1}} }}}} {{{{ {{{BIG}: 1}}|tojson }}}} {{{{ {BIG} is integer }}}} {{{{ {BIG} is number }}}} {{{{ {BIG} is odd }}}} {{{{ {BIG} is even }}}} {{{{ {BIG} is divisibleby(10) }}}} {{{{ {BIG} is float }}}} {{{{ 'x' if {BIG} }}}}",
    f"{{{{ '%d' % {BIG} }}}} {{{{ '%+40d|' % {BIG} }}}} {{{{ '%-40d|' % -{BIG} }}}} {{{{ '%d' % 1e20 }}}} {{{{ '{{:,}}'.format({BIG}) }}}} {{{{ '{{:>40}}'.format({BIG}) }}}} {{{{ '%s' % {BIG} }}}} {{{{ '%.3e' % {BIG} }}}} {{{{ '%040d' % {BIG} }}}}",
    f"{{{{ [{BIG}, 1, -{BIG}]|sort }}}} {{{{ [{BIG}, 1]|sum }}}} {{{{ [{BIG}, 1]|max }}}} {{{{ {BIG} ~ '' }}}} {{{{ {BIG} in [{BIG}] }}}} {{{{ {BIG} - {BIG} + 3 }}}} {{{{ nums[{BIG} - {BIG}] }}}} {{{{ {BIG}|string|length }}}}",
    "{{ 7 ** 100 }} {{ (-7) ** 101 }} {{ 0 ** (2 ** 70) }} {{ (-1) ** (2 ** 70 + 1) }} {{ 1 ** (2 ** 70) }} {{ (2 ** 100) ** 3 }} {{ 2 ** 1000 % 1000007 }} {{ 10 ** 50 // 10 ** 48 }}",
    f"{{{{ {BIG} // 0 }}}}", f"{{{{ {BIG} % 0 }}}}", f"{{{{ {BIG} / 0 }}}}", "{{ (10 ** 400)|float }}", "{{ 10 ** 400 * 1.0 }}", f"{{{{ nums[{BIG}:] }}}}", f"{{{{ range({BIG}) }}}}", "{{ '%d' % (1e308 * 10) }}",
    "{{ 10 ** 5000 }}", f"{{{{ 'a' * {BIG} }}}}", "{{ 10 ** 400 / 3 }}", f"{{{{ {BIG} + 'a' }}}}", f"{{{{ {BIG} < 'a' }}}}", f"{{{{ nums[{BIG}] }}}}|",
]

CASES = STATEFUL + ESCAPED + LONG_INTEGERS + TEXT + LITERALS + OPERATORS + STRING_METHODS + CONTAINERS + FILTERS + TESTS + STATEMENTS + ERRORS
