"""Worked examples that show a base model the form of an answer. Written for VERL; no benchmark contains them."""

DEMONSTRATIONS: dict[str, list[tuple[str, str]]] = {
    "words": [
        (
            "A baker puts 6 rolls into each bag. In the morning she fills 14 bags, and 9 rolls are left over. How many "
            "rolls did she bake?",
            "The bags hold 14 * 6 = 84 rolls. With the 9 that are left over she baked 84 + 9 = 93 rolls. The final "
            "answer is \\boxed{93}.",
        ),
        (
            "Nadia reads 18 pages on Monday, twice as many on Tuesday, and 11 fewer on Wednesday than on Tuesday. How "
            "many pages does she read in the three days?",
            "On Tuesday she reads 2 * 18 = 36 pages. On Wednesday she reads 36 - 11 = 25 pages. Together these are "
            "18 + 36 + 25 = 79 pages. The final answer is \\boxed{79}.",
        ),
        (
            "A tram ticket costs $2.40, a card for ten rides $19. How many dollars does the card save over ten single "
            "tickets?",
            "Ten single tickets cost 10 * 2.40 = 24 dollars. The card saves 24 - 19 = 5 dollars. The final answer is "
            "\\boxed{5}.",
        ),
        (
            "A tank holds 240 liters. Three quarters of it are used to water the garden, and a third of the rest to "
            "wash the car. How many liters are still in the tank?",
            "The garden takes 240 * 3/4 = 180 liters, which leaves 240 - 180 = 60 liters. The car takes 60 / 3 = 20 "
            "liters, which leaves 60 - 20 = 40 liters. The final answer is \\boxed{40}.",
        ),
    ],
    "formulas": [
        (
            "Solve $3(x-2) = x+8$ for $x$.",
            "Expanding the left side gives $3x - 6 = x + 8$. Subtracting $x$ and adding $6$ gives $2x = 14$, so "
            "$x = 7$. The final answer is \\boxed{7}.",
        ),
        (
            "What is the probability that two fair dice show a sum of at least $10$?",
            "There are $36$ equally likely outcomes. A sum of $10$ comes from $3$ of them, $11$ from $2$ and $12$ from "
            "$1$, so the probability is $\\frac{6}{36} = \\frac{1}{6}$. The final answer is \\boxed{\\frac{1}{6}}.",
        ),
        (
            "Find the domain of $f(x) = \\sqrt{5 - x} + \\frac{1}{x - 1}$.",
            "The root needs $5 - x \\ge 0$, so $x \\le 5$. The fraction needs $x \\neq 1$. Both hold on "
            "$(-\\infty, 1) \\cup (1, 5]$. The final answer is \\boxed{(-\\infty, 1) \\cup (1, 5]}.",
        ),
        (
            "Simplify $\\frac{\\sqrt{72} - \\sqrt{8}}{2}$.",
            "We have $\\sqrt{72} = 6\\sqrt{2}$ and $\\sqrt{8} = 2\\sqrt{2}$, so the numerator is $4\\sqrt{2}$ and the "
            "quotient $2\\sqrt{2}$. The final answer is \\boxed{2\\sqrt{2}}.",
        ),
    ],
    "choices": [
        (
            "A shirt of 40 dollars is sold at 15% less. What does it cost?\n(A) 25\n(B) 30\n(C) 34\n(D) 36",
            "The price falls by 40 * 0.15 = 6 dollars, to 40 - 6 = 34 dollars, which is option C. The final answer is "
            "\\boxed{C}.",
        ),
        (
            "Which of these numbers is prime?\n(A) 91\n(B) 97\n(C) 111\n(D) 119",
            "91 = 7 * 13, 111 = 3 * 37 and 119 = 7 * 17, while 97 has no divisor among 2, 3, 5 and 7, so it is prime: "
            "option B. The final answer is \\boxed{B}.",
        ),
        (
            "A stone falls from rest without friction. After twice the time, how far has it fallen?\n(A) as far\n"
            "(B) twice as far\n(C) three times as far\n(D) four times as far",
            "The distance grows with the square of the time, so twice the time gives $2^2 = 4$ times the distance, "
            "which is option D. The final answer is \\boxed{D}.",
        ),
    ],
    "chinese": [
        (
            "小林有 45 张邮票，送给弟弟 12 张后，又买了 3 包，每包 6 张。小林现在有多少张邮票？",
            "送出后还剩 45 - 12 = 33 张，又买了 3 × 6 = 18 张，现在有 33 + 18 = 51 张。最终答案是 \\boxed{51}。",
        ),
        (
            "一个长方形的周长是 26 厘米，长比宽多 3 厘米，它的面积是多少平方厘米？",
            "长与宽的和是 26 ÷ 2 = 13 厘米，宽是 (13 - 3) ÷ 2 = 5 厘米，长是 8 厘米，面积是 8 × 5 = 40 平方厘米。"
            "最终答案是 \\boxed{40}。",
        ),
        (
            "计算 $\\frac{2}{3} \\div \\frac{4}{9}$。",
            "除以一个分数等于乘它的倒数：$\\frac{2}{3} \\times \\frac{9}{4} = \\frac{18}{12} = \\frac{3}{2}$。"
            "最终答案是 \\boxed{\\frac{3}{2}}。",
        ),
    ],
}
"""Name, as in ``Benchmark.demonstrations`` -> questions with their worked answers."""
