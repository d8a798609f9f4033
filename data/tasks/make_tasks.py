"""Write choice.jsonl and free.jsonl: tables and sentences by hand, combined by a seeded generator.

    python data/tasks/make_tasks.py

The same seed writes the same bytes. Wrong choices come from the same table as the right one, so
that neither length nor kind gives the answer away; the right one's place is drawn by lot.
"""

# ruff: noqa: E501

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SEED = 20260

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "Greece": "Athens", "Austria": "Vienna", "Poland": "Warsaw",
    "Hungary": "Budapest", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "Belgium": "Brussels", "Russia": "Moscow",
    "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Morocco": "Rabat", "Ethiopia": "Addis Ababa", "Ghana": "Accra", "Japan": "Tokyo",
    "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires",
    "Chile": "Santiago", "Peru": "Lima", "Colombia": "Bogota", "Australia": "Canberra",
}  # fmt: skip
CONTINENTS = {
    "Europe": "France Germany Italy Spain Portugal Greece Austria Poland Norway Sweden Finland",
    "Africa": "Egypt Kenya Morocco Ethiopia Ghana Nigeria Tanzania Uganda Algeria Senegal",
    "Asia": "Japan China India Thailand Vietnam Indonesia Iran Iraq Nepal Mongolia",
    "South America": "Brazil Argentina Chile Peru Colombia Ecuador Bolivia Uruguay",
}
ANIMALS = {
    "mammal": "whale bat horse dolphin elephant rabbit wolf tiger cow monkey",
    "bird": "eagle penguin owl sparrow duck parrot ostrich swan crow pigeon",
    "fish": "salmon shark trout tuna cod herring carp eel sardine goldfish",
    "insect": "ant bee butterfly mosquito beetle moth wasp grasshopper fly cricket",
    "reptile": "snake lizard crocodile turtle iguana gecko tortoise alligator chameleon cobra",
}
SYMBOLS = {
    "hydrogen": "H", "helium": "He", "carbon": "C", "nitrogen": "N", "oxygen": "O",
    "sodium": "Na", "magnesium": "Mg", "aluminium": "Al", "silicon": "Si", "sulfur": "S",
    "chlorine": "Cl", "potassium": "K", "calcium": "Ca", "iron": "Fe", "copper": "Cu",
    "zinc": "Zn", "silver": "Ag", "tin": "Sn", "gold": "Au", "mercury": "Hg", "lead": "Pb",
    "uranium": "U", "neon": "Ne", "iodine": "I",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "early": "late", "open": "closed",
    "full": "empty", "hard": "soft", "light": "dark", "high": "low", "happy": "sad",
    "rich": "poor", "young": "old", "strong": "weak", "wet": "dry", "long": "short",
    "wide": "narrow", "loud": "quiet", "clean": "dirty", "near": "far", "thick": "thin",
    "true": "false", "cheap": "expensive", "easy": "difficult", "first": "last", "up": "down",
    "left": "right", "begin": "end", "push": "pull", "win": "lose", "buy": "sell",
    "love": "hate", "remember": "forget", "arrive": "leave", "accept": "refuse",
    "increase": "decrease", "brave": "afraid", "sweet": "bitter", "ancient": "modern",
}  # fmt: skip
YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal",
    "pig": "piglet", "lion": "cub", "duck": "duckling", "hen": "chick", "frog": "tadpole",
    "goat": "kid", "kangaroo": "joey", "swan": "cygnet", "butterfly": "caterpillar",
}  # fmt: skip
PRAISE = [
    "The staff were kind and the room was spotless.", "I laughed the whole way through.",
    "Best soup I have had in years.", "The battery lasts for days and charges quickly.",
    "A moving story with wonderful actors.", "Delivery came early and everything was perfect.",
    "My children loved every minute of it.", "The new keyboard feels great to type on.",
    "An excellent guide who knew everything about the town.", "Fresh bread, friendly people.",
    "The sound is clear and the fit is comfortable.", "I would gladly stay here again.",
    "The ending was brilliant.", "They fixed my bike in an hour and charged very little.",
    "A beautiful garden and a delicious breakfast.", "The book is a joy from start to finish.",
]  # fmt: skip
BLAME = [
    "The staff were rude and the room was filthy.", "I was bored the whole way through.",
    "Worst soup I have had in years.", "The battery dies in an hour and charges slowly.",
    "A dull story with terrible actors.", "Delivery came late and everything was broken.",
    "My children hated every minute of it.", "The new keyboard feels awful to type on.",
    "A useless guide who knew nothing about the town.", "Stale bread, unfriendly people.",
    "The sound is muddy and the fit is painful.", "I would never stay here again.",
    "The ending was a disaster.", "They broke my bike and charged far too much.",
    "A neglected garden and a disgusting breakfast.", "The book is a waste of time.",
]  # fmt: skip
THINGS = ["hotel", "film", "restaurant", "phone", "play", "shop", "tour", "headset", "novel"]
TOPICS = {
    "sports": [
        "The striker scored twice in the second half.", "She won the marathon by three minutes.",
        "The coach changed the team before the final.", "Rain stopped the tennis match at noon.",
        "Their goalkeeper saved two penalties.", "He broke the national swimming record.",
        "The league begins again in August.", "The cyclist fell on the last climb of the race.",
    ],
    "cooking": [
        "Fry the onions in butter until they are golden.", "Let the dough rest for an hour.",
        "Add a pinch of salt to the boiling water.", "Bake the cake at 180 degrees.",
        "Whisk the eggs with sugar and flour.", "Serve the soup with fresh parsley.",
        "Grate the cheese over the pasta.", "Marinate the chicken in lemon and garlic.",
    ],
    "finance": [
        "The bank raised its interest rates again.", "Shares fell by four percent on Monday.",
        "Investors sold bonds after the report.", "The company paid a dividend to shareholders.",
        "Inflation slowed for the third month.", "She opened a savings account for her son.",
        "The loan must be repaid within ten years.", "The euro gained against the dollar.",
    ],
    "weather": [
        "Heavy snow is expected in the mountains.", "It will be sunny with a light wind.",
        "Fog covered the valley this morning.", "A storm will reach the coast by night.",
        "Temperatures drop below zero on Friday.", "Thunder and hail are likely after lunch.",
        "The heat wave will last until Sunday.", "Clouds clear from the west by evening.",
    ],
    "medicine": [
        "The surgeon removed the tumour in two hours.", "Take the tablets after each meal.",
        "The vaccine protects against the virus.", "Her fever went down after the treatment.",
        "The nurse measured his blood pressure.", "The patient was allergic to penicillin.",
        "A broken wrist needs six weeks to heal.", "The clinic tests blood for diabetes.",
    ],
}  # fmt: skip
NAMES = [
    "Lena Fischer", "Omar Haddad", "Mei Lin", "Carlos Vega", "Anna Novak", "David Stone",
    "Priya Nair", "Tom Baker", "Julia Rossi", "Ivan Petrov", "Grace Obi", "Emil Berg",
]  # fmt: skip
CITIES = [
    "Oslo",
    "Lima",
    "Cairo",
    "Hanoi",
    "Dublin",
    "Prague",
    "Boston",
    "Naples",
    "Kyoto",
    "Perth",
]
GOODS = ["lamp", "desk", "tent", "clock", "camera", "kettle", "guitar", "jacket", "drill", "scarf"]
MONTHS = ["January", "March", "April", "May", "June", "July", "September", "October", "December"]
COLOURS = ["red", "blue", "green", "yellow", "black", "white", "brown", "purple"]
FIRST = ["Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gil", "Hana", "Ian", "Jo", "Kim", "Leo"]
ZH_CAPITALS = {
    "法国": "巴黎", "德国": "柏林", "意大利": "罗马", "西班牙": "马德里", "日本": "东京", "中国": "北京",
    "俄罗斯": "莫斯科", "英国": "伦敦", "埃及": "开罗", "泰国": "曼谷", "韩国": "首尔", "希腊": "雅典",
    "加拿大": "渥太华", "澳大利亚": "堪培拉", "越南": "河内", "印度": "新德里", "古巴": "哈瓦那", "秘鲁": "利马",
}  # fmt: skip
ZH_OPPOSITES = {
    "大": "小", "高": "低", "长": "短", "快": "慢", "热": "冷", "多": "少", "新": "旧", "远": "近",
    "轻": "重", "深": "浅", "早": "晚", "强": "弱", "真": "假", "开": "关", "左": "右", "胖": "瘦",
    "干": "湿", "明": "暗", "硬": "软", "贵": "便宜", "上": "下", "前": "后", "进": "出", "买": "卖",
}  # fmt: skip
ZH_PRAISE = [
    "房间很干净，服务员很热情。", "这本书太精彩了，我一口气读完。", "菜很好吃，下次还来。", "手机很快，电池也很耐用。",
    "演员演得好，故事很感人。", "送货很快，包装也很好。", "孩子们玩得非常开心。", "价格便宜，质量很好。",
]  # fmt: skip
ZH_BLAME = [
    "房间很脏，服务员很冷淡。", "这本书太无聊了，我读不下去。", "菜很难吃，再也不来了。", "手机很慢，电池也不耐用。",
    "演员演得差，故事很乏味。", "送货很慢，包装也破了。", "孩子们觉得非常无聊。", "价格很贵，质量很差。",
]  # fmt: skip
ZH_TOPICS = {
    "体育": [
        "球队在下半场进了两个球。",
        "她打破了全国游泳纪录。",
        "教练在决赛前换了队员。",
        "马拉松比赛在周日举行。",
    ],
    "美食": [
        "把面团放一个小时。",
        "汤里加一点盐和葱花。",
        "鸡肉要先用酱油腌一下。",
        "蛋糕要烤三十分钟。",
    ],
    "天气": [
        "明天有大雨，气温下降。",
        "山区今晚会下雪。",
        "周末天气晴朗，风很小。",
        "早上有雾，中午散去。",
    ],
    "医疗": [
        "医生给病人做了手术。",
        "这种药饭后服用。",
        "护士给他量了血压。",
        "疫苗可以预防这种病毒。",
    ],
}
SNIPPETS = [
    ("def add(a, b):\n    return", ["a + b", "a - b", "a * b", "b, a, a"]),
    ("def square(x):\n    return", ["x * x", "x + x", "2 * x", "x / x"]),
    ("def is_even(n):\n    return n % 2 ==", ["0", "1", "2", "n"]),
    ("def is_odd(n):\n    return n % 2 ==", ["1", "0", "2", "n"]),
    ("def first(items):\n    return items[", ["0]", "1]", "-1]", "2]"]),
    ("def last(items):\n    return items[", ["-1]", "0]", "1]", "2]"]),
    ("def maximum(a, b):\n    return a if a > b else", ["b", "a", "a + b", "None"]),
    ("def minimum(a, b):\n    return a if a < b else", ["b", "a", "a + b", "None"]),
    ("for i in range(10):\n   ", [" print(i)", " import i", " return def", " else i"]),
    ("with open('notes.txt') as f:\n    text = f.", ["read()", "write()", "pop()", "sort()"]),
    ("names = ['b', 'a']\nnames.", ["sort()", "read()", "upper()", "keys()"]),
    ("word = 'tea'\nprint(word.", ["upper())", "append('x'))", "keys())", "items())"]),
    ("ages = {'Ann': 3}\nfor name, age in ages.", ["items():", "sort():", "upper():", "read():"]),
    ("import math\nprint(math.", ["sqrt(16))", "upper('a'))", "append(1))", "read())"]),
    ("try:\n    x = int(text)\nexcept", [" ValueError:", " print:", " import:", " return:"]),
    ("total = 0\nfor x in numbers:\n    total", ["+= x", "= []", "== x", "is x"]),
    ("if x > 0:\n    sign = 1\nelif x < 0:\n    sign =", ["-1", "1", "0", "x > 0"]),
    ("class Dog:\n    def __init__(self, name):\n        self.name =",
     ["name", "self", "Dog", "None.name"]),
    ("def greet(name):\n    return 'Hello, ' +", ["name", "greet", "return", "'name'"]),
    ("numbers = [3, 1, 2]\nprint(len(numbers))  # prints", ["3", "2", "6", "1"]),
    ("print(2 ** 3)  # prints", ["8", "6", "5", "9"]),
    ("print('a' * 3)  # prints", ["aaa", "a3", "3a", "a a"]),
    ("print([1, 2] + [3])  # prints", ["[1, 2, 3]", "[4, 2]", "[1, 5]", "6"]),
    ("print(10 // 3)  # prints", ["3", "3.33", "4", "1"]),
    ("print(10 % 3)  # prints", ["1", "3", "0", "10"]),
    ("print('abc'[0])  # prints", ["a", "b", "c", "abc"]),
    ("print(bool(''))  # prints", ["False", "True", "None", "''"]),
    ("print(sorted([2, 3, 1]))  # prints", ["[1, 2, 3]", "[3, 2, 1]", "[2, 3, 1]", "6"]),
    ("x = 5\nx += 2\nprint(x)  # prints", ["7", "5", "2", "52"]),
    ("while True:\n    if done:\n       ", [" break", " import", " def", " else"]),
]  # fmt: skip
VARIABLES = ["value", "count", "price", "score", "width", "speed", "level", "depth"]


def question(text: str) -> str:
    return f"Question: {text}\nAnswer:"


def zh_question(text: str) -> str:
    return f"问题：{text}\n答案："


class Items:
    """Collects items; no prompt twice in one file and category."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rows: list[dict] = []
        self._seen: set[tuple] = set()

    def add(self, category: str, language: str, prompt: str, right: str, wrong, group: str = ""):
        """A choice item; `wrong` holds candidates for the three wrong choices.

        Items that share a `group` are variants of one text, and no independent evidence.
        """
        if (category, prompt) in self._seen:
            return
        self._seen.add((category, prompt))
        others = sorted({w for w in wrong if w != right})
        choices = [right, *self.rng.sample(others, min(3, len(others)))]
        self.rng.shuffle(choices)
        number = sum(r["category"] == category for r in self.rows)
        self.rows.append({
            "id": f"{category}-{number:03d}", "category": category, "language": language,
            "prompt": prompt, "choices": choices,
            "answer": choices.index(right), **({"group": group} if group else {}),
        })  # fmt: skip

    def ask(self, category: str, language: str, prompt: str, answers: list[str]):
        """A free-answer item."""
        if (category, prompt) in self._seen:
            return
        self._seen.add((category, prompt))
        number = sum(r["category"] == category for r in self.rows)
        self.rows.append({
            "id": f"{category}-{number:03d}", "category": category, "language": language,
            "prompt": prompt, "answers": answers,
        })  # fmt: skip


def members(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    for group, words in table.items():
        yield from ((word, group) for word in words.split())


def facts(items: Items) -> None:
    def space(words):
        return [f" {w}" for w in words]

    for country, city in CAPITALS.items():
        prompt = question(f"What is the capital of {country}?")
        items.add("facts", "en", prompt, f" {city}", space(CAPITALS.values()))
        prompt = question(f"{city} is the capital of which country?")
        items.add("facts", "en", prompt, f" {country}", space(CAPITALS))
    for country, continent in members(CONTINENTS):
        prompt = question(f"On which continent is {country}?")
        items.add("facts", "en", prompt, f" {continent}", space(CONTINENTS))
    for animal, group in members(ANIMALS):
        prompt = question(f"What kind of animal is the {animal}?")
        items.add("facts", "en", prompt, f" {group}", space(ANIMALS))
    for element, symbol in SYMBOLS.items():
        prompt = question(f"What is the chemical symbol for {element}?")
        items.add("facts", "en", prompt, f" {symbol}", space(SYMBOLS.values()))
    for word, other in OPPOSITES.items():
        for asked, right in ((word, other), (other, word)):
            prompt = question(f'What is the opposite of "{asked}"?')
            pool = space({*OPPOSITES, *OPPOSITES.values()} - {asked})
            items.add("words", "en", prompt, f" {right}", pool)
    for animal, young in YOUNG.items():
        prompt = question(f"What is a young {animal} called?")
        items.add("words", "en", prompt, f" {young}", space(YOUNG.values()))


def arithmetic(items: Items, n: int) -> None:
    rng = items.rng
    while sum(r["category"] == "arithmetic" for r in items.rows) < n:
        sign = rng.choice("+-×")
        a, b = (rng.randint(2, 9), rng.randint(2, 9)) if sign == "×" else (
            rng.randint(2, 60), rng.randint(2, 30))  # fmt: skip
        a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
        value = {"+": a + b, "-": a - b, "×": a * b}[sign]
        near = {value + d for d in (-10, -3, -2, -1, 1, 2, 3, 10) if value + d >= 0}
        prompt = question(f"What is {a} {sign} {b}?")
        items.add("arithmetic", "en", prompt, f" {value}", [f" {w}" for w in near])


def reasoning(items: Items, n: int) -> None:
    rng = items.rng
    while sum(r["category"] == "reasoning" for r in items.rows) < n:
        a, b, c = rng.sample(FIRST, 3)
        kind = rng.randrange(4)
        if kind == 0:
            word, asked, right = rng.choice(
                [("older", "oldest", a), ("older", "youngest", c), ("taller", "tallest", a),
                 ("taller", "shortest", c), ("faster", "fastest", a), ("faster", "slowest", c)]
            )  # fmt: skip
            facts_ = [f"{a} is {word} than {b}.", f"{b} is {word} than {c}."]
            rng.shuffle(facts_)
            text, wrong = f"{' '.join(facts_)} Who is the {asked}?", [a, b, c]
        elif kind == 1:
            x, y, z = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 4)
            thing = rng.choice(["apples", "coins", "books", "cards"])
            right = str(x + y - z)
            text = (f"{a} has {x} {thing}, gets {y} more and gives {z} to {b}. "
                    f"How many {thing} does {a} have now?")  # fmt: skip
            wrong = [
                str(v) for v in {x + y, x + y + z, x + y - z + 1, max(x - z, 0), x + y - z - 1}
            ]
        elif kind == 2:
            colours = rng.sample(COLOURS, 3)
            places = rng.sample(["box", "bag", "drawer", "cup"], 3)
            pairs = list(zip(colours, places, strict=True))
            told = " ".join(f"The {k} ball is in the {p}." for k, p in pairs)
            colour, right = rng.choice(pairs)
            text, wrong = f"{told} Where is the {colour} ball?", places
            right, wrong = f"in the {right}", [f"in the {p}" for p in [*places, "house"]]
        else:
            start, move = rng.randint(1, 8), rng.randint(1, 4)
            right = f"{start + move} o'clock"
            text = f"A film starts at {start} o'clock and lasts {move} hours. When does it end?"
            wrong = [f"{h} o'clock" for h in {start, move, start + move + 1, start + move - 1, 12}]
        items.add("reasoning", "en", question(text), f" {right}", [f" {w}" for w in wrong])


def classification(items: Items) -> None:
    for thing in THINGS:
        for texts, right in ((PRAISE, " positive"), (BLAME, " negative")):
            for text in items.rng.sample(texts, 7):
                prompt = f"Review of a {thing}: {text}\nThe review is"
                items.add("sentiment", "en", prompt, right, [" positive", " negative"], text)
    for topic, texts in TOPICS.items():
        for text in texts:
            for lead in ("Text", "Note", "Message"):
                prompt = f"{lead}: {text}\nThe topic is"
                items.add("topic", "en", prompt, f" {topic}", [f" {t}" for t in TOPICS], text)


def order(rng: random.Random) -> dict[str, str]:
    return {
        "name": rng.choice(NAMES), "city": rng.choice(CITIES), "product": rng.choice(GOODS),
        "month": rng.choice(MONTHS), "number": str(rng.randint(1000, 9999)),
    }  # fmt: skip


POOLS = {"name": NAMES, "city": CITIES, "product": GOODS, "month": MONTHS}


def sentence(o: dict[str, str], rng: random.Random) -> str:
    return rng.choice([
        "Order {number}: one {product} for {name}, to be sent to {city} in {month}.",
        "In {month} {name} from {city} bought a {product} (order {number}).",
        "{name} asked us to deliver the {product} of order {number} to {city} in {month}.",
    ]).format(**o)  # fmt: skip


def extraction(items: Items, n: int) -> None:
    rng = items.rng
    while sum(r["category"] == "extraction" for r in items.rows) < n:
        o = order(rng)
        field = rng.choice([*POOLS])
        prompt = f"{sentence(o, rng)}\n{field.capitalize()}:"
        items.add("extraction", "en", prompt, f" {o[field]}", [f" {w}" for w in POOLS[field]])


def formats(items: Items, n: int) -> None:
    rng = items.rng
    while sum(r["category"] == "format" for r in items.rows) < n:
        o = order(rng)
        right = json.dumps({"name": o["name"], "city": o["city"]})
        wrong = [right[:-1], right.replace(":", "=", 1), right.replace('"', "", 1),
                 right.replace(", ", " ; "), right[1:], right.replace('"city"', "city")]  # fmt: skip
        prompt = f"{sentence(o, rng)}\nThe name and the city as a JSON object:"
        items.add("format", "en", prompt, f" {right}", [f" {w}" for w in wrong])


def code(items: Items) -> None:
    for before, choices in SNIPPETS:
        for name in ("", *VARIABLES[:4]):
            lead = f"{name} = {len(name)}\n\n" if name else ""
            glue = "" if before[-1] in "[.= " or before.endswith(" ") else " "
            glue = " " if before[-1] == "=" else glue
            prompt = f"# Python\n{lead}{before}"
            right, *wrong = (f"{glue}{c}" for c in choices)
            items.add("code", "code", prompt, right, wrong, before)


def chinese(items: Items) -> None:
    for country, city in ZH_CAPITALS.items():
        items.add("zh-facts", "zh", zh_question(f"{country}的首都是哪里？"), city,
                  ZH_CAPITALS.values())  # fmt: skip
        items.add("zh-facts", "zh", zh_question(f"{city}是哪个国家的首都？"), country,
                  ZH_CAPITALS)  # fmt: skip
    pool = {*ZH_OPPOSITES, *ZH_OPPOSITES.values()}
    for word, other in ZH_OPPOSITES.items():
        for asked, right in ((word, other), (other, word)):
            prompt = zh_question(f"“{asked}”的反义词是什么？")
            items.add("zh-words", "zh", prompt, right, pool - {asked})
    for thing in ("酒店", "商品", "节目"):
        for texts, right in ((ZH_PRAISE, "好评"), (ZH_BLAME, "差评")):
            for text in texts:
                prompt = f"{thing}评论：{text}\n这是"
                items.add("zh-sentiment", "zh", prompt, right, ["好评", "差评"], text)
    for topic, texts in ZH_TOPICS.items():
        for text in texts:
            for lead in ("文字", "消息"):
                prompt = f"{lead}：{text}\n主题是"
                items.add("zh-topic", "zh", prompt, topic, ZH_TOPICS, text)


def free(items: Items) -> None:
    rng = items.rng
    for country, city in CAPITALS.items():
        items.ask("facts", "en", question(f"What is the capital city of {country}?"), [city])
    for word, other in OPPOSITES.items():
        items.ask("words", "en", question(f'Give one word that means the opposite of "{word}".'),
                  [other])  # fmt: skip
    while sum(r["category"] == "arithmetic" for r in items.rows) < 60:
        a, b = rng.randint(2, 40), rng.randint(2, 40)
        items.ask("arithmetic", "en", question(f"How much is {a} plus {b}?"), [str(a + b)])
    while sum(r["category"] == "extraction" for r in items.rows) < 120:
        o, field = order(rng), rng.choice([*POOLS, "number"])
        items.ask("extraction", "en", f"{sentence(o, rng)}\nThe {field} is:", [o[field]])
    for country, city in ZH_CAPITALS.items():
        items.ask("zh-facts", "zh", zh_question(f"{country}的首都叫什么？"), [city])
    for word, other in ZH_OPPOSITES.items():
        items.ask("zh-words", "zh", zh_question(f"和“{word}”意思相反的字是？"), [other])
    while sum(r["category"] == "list" for r in items.rows) < 40:
        chosen = rng.sample(COLOURS, 3)
        text = "Repeat these words, separated by commas: " + " ".join(chosen)
        items.ask("list", "en", question(text), [", ".join(chosen)])


def main() -> None:
    choice, answers = Items(random.Random(SEED)), Items(random.Random(SEED + 1))
    facts(choice)
    arithmetic(choice, 260)
    reasoning(choice, 260)
    classification(choice)
    extraction(choice, 300)
    formats(choice, 180)
    code(choice)
    chinese(choice)
    free(answers)
    for name, items in (("choice", choice), ("free", answers)):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in items.rows)
        (HERE / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
